"""The local variables of Megatron-LM's train(), for a worker that comes into it later.

train() can begin with any iteration, as after a checkpoint was loaded. But what it has added up
since the last line of its log, whether the forward pass gathers weights, and since when the job
runs, only those know who have been there.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# What loading a checkpoint sets in the arguments, besides the counters of side_state.py.
_LOADED = ("iteration", "num_floating_point_operations_so_far", "finetune")
# When the job began, by which it ends after a time that was asked for.
_BEGAN = ("_TRAIN_START_TIME", "_LEGACY_TRAIN_START_TIME")
_TRAINING = "megatron.training.training"


class JobState(NamedTuple):
    """The variables, before a step; ``interval`` is None before the first line of the log."""

    loaded: dict[str, Any]
    began: dict[str, float]
    num_floating_point_operations: float
    interval: dict[str, Any] | None
    reports_memory: bool
    gathers_in_forward: bool


class LoopVariables:
    """The variables of one worker's train()."""

    def __init__(self, args: Any, chunks: list[Any]) -> None:
        self._args, self._chunks = args, chunks
        self._num_floating_point_operations: float | None = None
        self._interval: dict[str, Any] | None = None
        self._reports_memory = True
        # Of a worker that came later: until its first step, and until its first line of the log.
        self._begins: JobState | None = None
        self._logs: JobState | None = None

    def counted(self, num_floating_point_operations: float) -> None:
        """So many operations were done in all steps."""
        self._num_floating_point_operations = num_floating_point_operations

    def logged(self, interval: dict[str, Any], reports_memory: bool) -> None:
        """A step was logged: the sums since the last line are ``interval`` now."""
        self._interval, self._reports_memory = interval, reports_memory

    def tell(self) -> dict[str, Any]:
        """All of it, alike on all workers; tensors on the host."""
        args, interval = self._args, self._interval
        count = self._num_floating_point_operations
        if count is None:
            count = float(args.num_floating_point_operations_so_far)
        told = JobState(
            loaded={name: getattr(args, name) for name in _LOADED},
            began={name: vars(import_module(_TRAINING))[name] for name in _BEGAN},
            num_floating_point_operations=count,
            interval=None if interval is None else {k: _on_host(v) for k, v in interval.items()},
            reports_memory=self._reports_memory,
            gathers_in_forward=any(c.remove_forward_pre_hook_handles for c in self._chunks),
        )
        return told._asdict()

    # ---- on a worker that came later ------------------------------------------------------------

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Have train() begin with this step where it knows nothing: told[rank] is None."""
        if told[dist.get_rank()] is not None:
            return
        state = JobState(**next(one for one in told if one is not None))
        self._begins = self._logs = state
        vars(import_module(_TRAINING)).update(state.began)
        self._args.iteration = step
        self._args.num_floating_point_operations_so_far = state.num_floating_point_operations

    def first_step(self) -> None:
        """train() has begun: from now on it is where the others are."""
        state, self._begins = self._begins, None
        if state is None:
            return
        vars(self._args).update(state.loaded)
        if state.gathers_in_forward:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
            if self._args.align_param_gather:
                # As train() sets it, and sets it again after a worker's first step.
                gather = [chunk.start_param_sync for chunk in self._chunks]
                self._chunks[0].config.param_sync_func = gather if len(gather) > 1 else gather[0]

    def before_logging(self, arguments: dict[str, Any]) -> None:
        """Complete the arguments of ``training_log`` with what there was before it came."""
        state, self._logs = self._logs, None
        if state is not None and state.interval is not None:
            device = torch.cuda.current_device()
            arguments["total_loss_dict"].update(
                {k: v.to(device) if torch.is_tensor(v) else v for k, v in state.interval.items()}
            )
            arguments["report_memory_flag"] = state.reports_memory
            arguments["is_first_iteration"] = False


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value
