"""`examples/train_gpt.py` with a loop of its own, and without a line of ours; a script as well."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import own_scripts
from tests.faults.own_scripts import Change

_LOADER = """\
    def loader(dataset):
        sampler = torch.utils.data.DistributedSampler(
            dataset,
            num_replicas=parallel_state.get_data_parallel_world_size(),
            rank=parallel_state.get_data_parallel_rank(),
            shuffle=False,
        )
        return torch.utils.data.DataLoader(dataset, args.micro_batch_size, sampler=sampler)

    train_batches, valid_loader = iter(loader(train)), loader(valid)
"""
_SIZE = '        "micro_batch_size": args.micro_batch_size,\n'
_COUNT = """\
        "num_microbatches": args.global_batch_size
        // parallel_state.get_data_parallel_world_size(),
"""
LOOP = """\
    for iteration in range(args.train_iters):
        losses, grad_norm = train_step()
        loss = sum(total / tokens for total, tokens in losses) / max(len(losses), 1)
        print_rank_0(f"step {iteration:4d} | own loss {loss:.6f} | grad norm {grad_norm or 0:.4f}")
        if args.eval_interval and (iteration + 1) % args.eval_interval == 0:
            loss = sum(total / tokens for batch in evaluate() for total, tokens in batch)
            print_rank_0(f"step {iteration:4d} | validation loss {float(loss).hex()}")
        if args.save and args.save_interval and (iteration + 1) % args.save_interval == 0:
            save(iteration + 1)


"""
_BATCHES = (
    "    train_batches, valid_batches = job.batches(train), job.batches(valid)  # [elastic] 6\n"
)
_EVALUATE = "    def evaluate():\n"
_DONE = "        done = scheduler.num_steps // args.global_batch_size\n"
_NAME = '    job.name_newest(Path(folder) / "latest_checkpointed_iteration.txt", iteration)\n'
_NAMED = """\
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
"""
_WRAP = "job.forward_backward(get_forward_backward_func())  # [elastic] 7"
_DEVICE = '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])'
_END = 'if __name__ == "__main__"'


def start() -> tuple[Change, ...]:
    """The lines of ours before the model is there, and what stands there in a script without us."""
    text = own_scripts.SCRIPT.read_text()
    device = text.index(_DEVICE)
    return (
        (text[device : text.index("\n", device) + 1], ""),
        ("from elaswave_plugin.adapters import megatron as elaswave  # [elastic] 1\n", ""),
        ("    elaswave.add_arguments(parser)  # [elastic] 2\n", ""),
        ("    job = elaswave.attach(args)  # [elastic] 3\n", ""),
        ("(**job.process_group())  # [elastic] 4", '("gloo")'),
    )


def changes() -> tuple[Change, ...]:
    """Each line of ours, and what stands there in a script that knows nothing of us."""
    text = own_scripts.SCRIPT.read_text()
    begin, end = text.index("    last = save if"), text.index(_END)
    return (
        (text[begin:end], LOOP),
        *start(),
        (own_scripts._BIND, ""),
        (_BATCHES, _LOADER),
        (_WRAP, "get_forward_backward_func()"),
        (_SIZE, _SIZE + _COUNT),
        (_EVALUATE, _EVALUATE + "        valid_batches = iter(valid_loader)\n"),
        ("    def save():\n", "    def save(done):\n"),
        (_DONE, ""),
        ("        save_checkpoint(job, args.save", "        save_checkpoint(args.save"),
        ("def save_checkpoint(job, folder", "def save_checkpoint(folder"),
        (_NAME, _NAMED),
    )


def another(loop: str, *, functions: str) -> tuple[Change, ...]:
    """Such a script with another loop, from its loaders on, and other functions for it."""
    text = own_scripts.SCRIPT.read_text()
    begin, end = text.index(own_scripts._BIND), text.index(_END)
    first, last = text.index("def save_checkpoint("), text.index("def print_rank_0(")
    return ((text[begin:end], loop), (text[first:last], functions), *start())


def write(folder: Path, *more: Change) -> str:
    """The path of such a script with more changes."""
    return own_scripts.write(folder, *changes(), *more)


if __name__ == "__main__":
    exec(compile(own_scripts.script(*changes()), __file__, "exec"))
