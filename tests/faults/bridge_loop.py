"""A loop in the shape of Megatron-Bridge's `train` and `train_step`; a script as well.

The calls of Megatron-Core in their order, with the names of their arguments; beside it the model,
the optimizer and the datasets of `examples/train_gpt.py`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import own_loop, own_scripts
from tests.faults.own_scripts import Change

_IMPORTS = """\
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
)
from megatron.core.timers import Timers


"""
_DDP = "        grad_reduce_in_fp32=True,\n"
# As the recipes set them.
_RECIPE = """\
        overlap_param_gather=True,
        average_in_collective=not args.calculate_per_token_loss,
"""
_OPTIMIZER = "            use_distributed_optimizer=True,\n        ),\n        model,"
_FINALIZE = "    config.finalize_model_grads_func = finalize_model_grads\n"
_SETTINGS = """\
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    starts = [chunk.start_grad_sync for chunk in model]
    config.grad_sync_func = starts if len(starts) > 1 else starts[0]
"""
_STEP = '''\
class InOrder:
    """Batches of one replica after another, in the order of the dataset."""

    def __init__(self, total_samples, micro_batch_size, data_parallel_rank, data_parallel_size):
        self.total_samples, self.micro_batch_size = total_samples, micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    def __len__(self):
        return self.total_samples

    def __iter__(self):
        step = self.micro_batch_size * self.data_parallel_size
        for start in range(0, self.total_samples - step + 1, step):
            first = start + self.data_parallel_rank * self.micro_batch_size
            yield [*range(first, first + self.micro_batch_size)]


def forward_step(state, batches, model):
    """A micro-batch of the iterator; ``state`` counts what the job has seen."""
    batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def loss_func(mask, output):
    """The sum, its tokens, and both as the report."""
    total, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    for is_bad, what in ((torch.isnan, "not a number"), (torch.isinf, "infinite")):
        get_rerun_state_machine().validate_result(
            result=total, rejection_func=is_bad, message=f"loss is {what}", tolerance=0.0
        )
    both = torch.stack([total.detach(), tokens])
    return total, tokens, {"lm loss": both}


def of_all_parts(value, operation, group):
    """One number of all parts of a model."""
    told = torch.tensor([-1.0 if value is None else float(value)]).cuda()
    torch.distributed.all_reduce(told, op=operation, group=group)
    return None if told.item() == -1.0 else told.item()


def reduced(reports, group):
    """Of each loss: its sum and its tokens, over all replicas."""
    found = {}
    for name in reports[0]:
        found[name] = torch.vstack([one[name].view(-1) for one in reports]).sum(dim=0)
        torch.distributed.all_reduce(found[name], group=group)
    return found


'''
LOOP = """\
    groups = ProcessGroupCollection.use_mpu_process_groups()
    state = argparse.Namespace(step=0, consumed=0)
    step_function = partial(forward_step, state)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        None,
        args.global_batch_size,
        args.micro_batch_size,
        groups.dp.size(),
    )

    def iterator_over(dataset, again=False):
        sampler = InOrder(
            total_samples=len(dataset),
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=groups.dp.rank(),
            data_parallel_size=groups.dp.size(),
        )
        loader = torch.utils.data.DataLoader(
            dataset, batch_sampler=sampler, num_workers=0, persistent_workers=False
        )
        return RerunDataIterator(iter(endless(loader) if again else loader))

    def endless(loader):
        while True:
            yield from loader

    def set_hooks(enabled, **how):
        for chunk in model:
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(**how)

    def train_step():
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(train_iterator):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reports = forward_backward(
                forward_step_func=step_function,
                data_iterator=train_iterator,
                model=model,
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.seq_length,
                forward_only=False,
                adjust_tensor_shapes_fn=None,
                p2p_communicator=communicator,
                pg_collection=groups,
            )
        _, ends, _ = machine.should_checkpoint_and_exit()
        if ends:
            raise SystemExit(1)
        timers("optimizer", log_level=1).start()
        succeeded, norm, _ = optimizer.step()
        timers("optimizer").stop()
        succeeded = of_all_parts(succeeded, torch.distributed.ReduceOp.MIN, groups.mp)
        norm = of_all_parts(norm, torch.distributed.ReduceOp.MAX, groups.mp)
        if succeeded:
            samples = get_num_microbatches() * args.micro_batch_size * width
            scheduler.step(increment=samples)
        losses = {}
        if is_last_stage:
            losses = {n: one[0] / one[1] for n, one in reduced(reports, groups.dp_cp).items()}
        return losses, not succeeded, norm

    def evaluate():
        torch.distributed.barrier()
        for chunk in model:
            chunk.eval()
        machine = get_rerun_state_machine()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)
        size = args.micro_batch_size * groups.dp.size()
        total = torch.zeros(2)
        with torch.no_grad():
            run = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
            for _ in range(args.eval_iters):
                reports = run(
                    forward_step_func=step_function,
                    data_iterator=valid_iterator,
                    model=model,
                    num_microbatches=args.global_batch_size // size,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=True,
                    adjust_tensor_shapes_fn=None,
                    p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config),
                    pg_collection=groups,
                )
                if is_last_stage:
                    total += reduced(reports, groups.dp_cp)["lm loss"].cpu()
        for chunk in model:
            chunk.train()
        machine.set_mode(mode)
        return float(total[0] / total[1])

    def save():
        path = Path(args.save) / f"iter_{state.step:07d}"
        if torch.distributed.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist", 1), groups.dp_cp, False
        )
        dist_checkpointing.save(
            {**state_to_save(model, optimizer, scheduler), "step": state.step},
            str(path),
            strategy,
            async_sharded_save=False,
            validate_access_integrity=True,
            preprocess_common_before_consistancy_check=dict,
            content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
        )
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
            tracker.write_text(str(state.step))

    config = model[0].config
    config.timers = timers = Timers(log_level=2, log_option="minmax")
    timers("interval-time", log_level=0).start(barrier=True)
    train_iterator, valid_iterator = iterator_over(train), iterator_over(valid, again=True)
    for chunk in model:
        chunk.train()
    get_rerun_state_machine().current_iteration = state.step
    torch.distributed.barrier()
    forward_backward = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
    communicator = P2PCommunicator(pp_group=groups.pp, config=config)
    is_last_stage = groups.pp.rank() == groups.pp.size() - 1
    width, start = groups.dp.size(), state.step
    gathers = config.param_sync_func
    set_hooks(False, param_sync=False)
    config.param_sync_func = None
    while state.step < args.train_iters:
        update_num_microbatches(state.consumed, consistency_check=False, verbose=True)
        update_num_microbatches(state.consumed, consistency_check=True, verbose=True)
        losses, skipped, norm = train_step()
        if state.step == start:
            if skipped:
                start = state.step + 1
            else:
                set_hooks(True)
                config.param_sync_func = gathers
        state.step += 1
        state.consumed += width * args.micro_batch_size * get_num_microbatches()
        print_rank_0(f"step {state.step} | {losses} | norm {norm} | {optimizer.get_loss_scale()}")
        assert timers("interval-time").elapsed(barrier=True) > 0
        if args.eval_interval and state.step % args.eval_interval == 0:
            set_hooks(False)
            torch.distributed.barrier()
            print_rank_0(f"step {state.step} | validation loss {evaluate().hex()}")
            set_hooks(True)
            torch.distributed.barrier()
        if args.save and args.save_interval and state.step % args.save_interval == 0:
            set_hooks(False)
            save()
            set_hooks(True)
    set_hooks(False)


"""


def changes() -> tuple[Change, ...]:
    """The lines that make it of a script whose loop is its own."""
    return (
        *own_loop.another(LOOP, functions=_IMPORTS + _STEP),
        (_DDP, _DDP + _RECIPE),
        (_OPTIMIZER, "            overlap_param_gather=True,\n" + _OPTIMIZER),
        (_FINALIZE, _SETTINGS),
    )


def write(folder: Path, *more: Change) -> str:
    """The path of such a script with more changes."""
    return own_scripts.write(folder, *changes(), *more)


if __name__ == "__main__":
    exec(compile(own_scripts.script(*changes()), __file__, "exec"))
