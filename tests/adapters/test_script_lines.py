"""The line of a script that asks for the workers: through frameworks, and not of a framework."""

import types
from collections.abc import Callable

import pytest

from elaswave_plugin.adapters.script_lines import asking_line


def called_from(*calls: str) -> Callable[[], str | None]:
    """Return the last of functions that call each other, the first one ours; "module:name" each."""
    inner: Callable[[], str | None] = asking_line
    for call in calls:
        module, _, name = call.partition(":")
        names = types.ModuleType(module).__dict__ | {"inner": inner}
        exec(compile(f"def {name}():\n    return inner()", f"/a/{module}.py", "exec"), names)
        inner = names[name]
    return inner


GROUP = "elaswave_plugin.communicator.groups.group_calls:allreduce"
TORCH = (GROUP, "torch.distributed.distributed_c10d:all_reduce")
LOGGED = (*TORCH, "torch.distributed.c10d_logger:wrapper")


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ((*LOGGED, "train:main"), "train.py:2 (all_reduce)"),
        ((*LOGGED, "__main__:main"), "__main__.py:2 (all_reduce)"),
        # A library of training, which has no adapter here, is as a script.
        ((*LOGGED, "lib.loop:step", "__main__:main"), "lib.loop.py:2 (all_reduce)"),
        ((*LOGGED, "deepspeed.comm.comm:all_reduce", "train:main"), "train.py:2 (all_reduce)"),
        ((*LOGGED, "accelerate.utils.operations:gather", "train:main"), "train.py:2 (gather)"),
        ((GROUP, "train:main"), "train.py:2 (allreduce)"),
        # By what the script has called, whatever that has called.
        (
            (*TORCH, "torch.distributed._functional_collectives:all_gather_tensor", "train:main"),
            "train.py:2 (all_gather_tensor)",
        ),
        (
            (*LOGGED, "transformers.trainer_pt_utils:distributed_concat", "train:main"),
            "train.py:2 (distributed_concat)",
        ),
        ((GROUP, "megatron.core.utils:get_pg_size", "train:main"), "train.py:2 (get_pg_size)"),
        ((*LOGGED, "megatron.core.tensor_parallel:gather_from_region", "train:main"), None),
        ((*LOGGED, "deepspeed.runtime.engine:allreduce_gradients", "train:main"), None),
        ((*LOGGED, "deepspeed.runtime.engine:step", "train:main"), None),
        ((*LOGGED, "transformers.trainer:train", "train:main"), None),
        ((*LOGGED, "accelerate.accelerator:prepare", "train:main"), None),
        ((*LOGGED, "elaswave_plugin.deepspeed:mean", "train:main"), None),
        ((*LOGGED, "threading:run"), None),
        ((GROUP, "torch.distributed.distributed_c10d:broadcast", "train:main"), None),
    ],
)
def test_the_line_that_asks_is_of_the_script(calls: tuple[str, ...], line: str | None) -> None:
    assert called_from(*calls)() == line
