"""A loop in the shape of ms-swift's Megatron trainer; a script as well.

The calls of Megatron-Core in their order, with the names of their arguments; beside it the model,
the optimizer and the datasets of `examples/train_gpt.py`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import own_loop, own_scripts
from tests.faults.own_scripts import Change

_FUNCTIONS = '''\
from megatron.core import mpu
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)


class Shuffled:
    """Batches of one replica in an order that is another in each epoch."""

    def __init__(self, dataset, micro_batch_size, data_parallel_rank, data_parallel_size):
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.consumed_samples = 0

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        step = self.micro_batch_size * self.data_parallel_size
        whole = len(self.dataset) - len(self.dataset) % step
        draws = torch.Generator().manual_seed(self.consumed_samples // whole)
        order = torch.randperm(whole, generator=draws).tolist()
        order = order[self.consumed_samples % whole :]
        mine = order[self.data_parallel_rank :: self.data_parallel_size]
        for start in range(0, len(mine), self.micro_batch_size):
            self.consumed_samples += step
            yield mine[start : start + self.micro_batch_size]


class Trainer:
    """What the loop is a method of."""

    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.models, self.optimizer = args, model, optimizer
        self.scheduler, self.config = scheduler, model[0].config
        self.rank, self.iteration = torch.distributed.get_rank(), 0
        self.metrics = {}

    def cyclic(self, loader):
        epoch = 0
        while True:
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            yield from loader
            epoch += 1
            if epoch == 1000:
                self.args.train_iters = self.iteration + 1

    def iterator_over(self, dataset):
        sampler = Shuffled(
            dataset,
            micro_batch_size=self.args.micro_batch_size,
            data_parallel_rank=mpu.get_data_parallel_rank(),
            data_parallel_size=mpu.get_data_parallel_world_size(),
        )
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=0,
            persistent_workers=False,
            collate_fn=self.collate,
        )
        return iter(self.cyclic(loader))

    def collate(self, rows):
        return torch.utils.data.default_collate(rows)

    def forward_step(self, batches, model):
        batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(self.loss_func, labels=labels)

    def loss_func(self, output, *, labels):
        counts = labels != -100
        loss = torch.cat([(output.float() * counts).sum().view(1), counts.sum().view(1)])
        report = loss.detach().clone()
        torch.distributed.all_reduce(
            report, group=mpu.get_data_parallel_group(with_context_parallel=True)
        )
        return loss[0].clone(), loss[1].detach().clone().to(torch.int), {"loss": report}

    def of_all_parts(self, value, operation):
        told = torch.tensor([-1.0 if value is None else float(value)]).cuda()
        torch.distributed.all_reduce(told, op=operation, group=mpu.get_model_parallel_group())
        return None if told.item() == -1.0 else told.item()

    def train_step(self, iterator):
        args = self.args
        forward_backward = get_forward_backward_func()
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=iterator,
            model=self.models,
            num_microbatches=self.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        succeeded, norm, _ = self.optimizer.step()
        succeeded = self.of_all_parts(succeeded, torch.distributed.ReduceOp.MIN)
        norm = self.of_all_parts(norm, torch.distributed.ReduceOp.MAX)
        if succeeded:
            self.scheduler.step(increment=args.global_batch_size)
        return reports, norm, bool(succeeded)

    def evaluate(self, iterator):
        args = self.args
        for chunk in self.models:
            chunk.eval()
        metrics = {}
        forward_backward = get_forward_backward_func()
        with torch.no_grad():
            for _ in range(args.eval_iters):
                reports = forward_backward(
                    forward_step_func=self.forward_step,
                    data_iterator=iterator,
                    model=self.models,
                    num_microbatches=self.num_microbatches,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=True,
                )
                self.add_up(reports, metrics)
        return metrics

    def add_up(self, reports, total):
        for report in reports:
            for name, value in report.items():
                total[name] = total.get(name, 0) + value.cpu()

    def log(self, what, metrics):
        shown = {name: float(one[0] / one[1]).hex() for name, one in metrics.items()}
        print_rank_0(f"{what} {self.iteration} | {shown}")

    def set_hooks(self, enabled, **how):
        for chunk in self.models:
            if enabled:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(**how)

    def save(self):
        path = Path(self.args.save) / f"iter_{self.iteration:07d}"
        path.mkdir(parents=True, exist_ok=True)
        how = {"distrib_optim_sharding_type": "fully_reshardable"}
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(),
            mpu.get_data_parallel_group(with_context_parallel=True),
        )
        dist_checkpointing.save(
            state_to_save(self.models, self.optimizer, self.scheduler),
            str(path),
            strategy,
            async_sharded_save=False,
            validate_access_integrity=True,
            preprocess_common_before_consistancy_check=dict,
            content_metadata=how,
        )
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            tracker = Path(self.args.save) / "latest_checkpointed_iteration.txt"
            tracker.write_text(str(self.iteration))

    def train(self, train, valid):
        args = self.args
        width = mpu.get_data_parallel_world_size()
        self.num_microbatches = args.global_batch_size // args.micro_batch_size // width
        for chunk in self.models:
            chunk.train()
        batches, held_out = self.iterator_over(train), self.iterator_over(valid)
        gathers = self.config.param_sync_func
        self.set_hooks(False, param_sync=False)
        self.config.param_sync_func = None
        start = 0
        while self.iteration < args.train_iters:
            reports, norm, succeeded = self.train_step(batches)
            if self.iteration == start:
                if succeeded:
                    self.set_hooks(True)
                    self.config.param_sync_func = gathers
                else:
                    start = self.iteration + 1
            self.iteration += 1
            self.metrics = {}
            self.add_up(reports, self.metrics)
            self.log("training loss", self.metrics)
            if args.eval_interval and self.iteration % args.eval_interval == 0:
                self.set_hooks(False)
                self.log("validation loss", self.evaluate(held_out))
                for chunk in self.models:
                    chunk.train()
                self.set_hooks(True)
            if args.save and args.save_interval and self.iteration % args.save_interval == 0:
                self.set_hooks(False)
                self.save()
                self.set_hooks(True)
        self.set_hooks(False)


'''
LOOP = """\
    few = torch.utils.data.Subset(train, range(24))
    Trainer(args, model, optimizer, scheduler).train(few, valid)


"""
# Since 4.6 losses are summed where they are logged, by the workers of the last stage.
_SUM = """\
        torch.distributed.all_reduce(
            report, group=mpu.get_data_parallel_group(with_context_parallel=True)
        )
"""
_LOG = "    def log(self, what, metrics):\n"
SUMS_IN_LOG: tuple[Change, ...] = (
    (_SUM, ""),
    (
        _LOG,
        _LOG
        + """\
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            metrics.setdefault("loss", torch.zeros(2))
            torch.distributed.all_reduce(
                metrics["loss"], group=mpu.get_data_parallel_group(with_context_parallel=True)
            )
        memory = self.of_all_parts(1.0, torch.distributed.ReduceOp.MAX)
""",
    ),
)
_DDP = "        grad_reduce_in_fp32=True,\n"
_OPTIMIZER = "            use_distributed_optimizer=True,\n        ),\n        model,"


def changes() -> tuple[Change, ...]:
    """The lines that make it of `examples/train_gpt.py`."""
    return (
        *own_loop.another(LOOP, functions=_FUNCTIONS),
        (_DDP, _DDP + "        overlap_param_gather=True,\n"),
        (_OPTIMIZER, "            overlap_param_gather=True,\n" + _OPTIMIZER),
    )


def write(folder: Path, *more: Change) -> str:
    """The path of such a script with more changes."""
    return own_scripts.write(folder, *changes(), *more)


if __name__ == "__main__":
    exec(compile(own_scripts.script(*changes()), __file__, "exec"))
