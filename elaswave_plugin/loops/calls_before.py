"""Collectives that a script calls by itself before it trains, kept for a worker that comes later.

Its script runs from the start, alone, and has in its tensors what the others had in theirs.
"""

import base64
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elaswave_plugin.loops.loop_body import fill, gathered_into, shapes_of
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import decode, encode

# Of which all workers have the same.
_ALIKE = ("allreduce", "broadcast", "allgather")
_WHAT = "what collectives before the training returned"
# Bytes of all results that are kept: each agent of the job has them.
_LARGEST = 1 << 18


class CallsBefore:
    """The results of the script's own collectives over all workers, until it trains."""

    def __init__(self, worker: Worker, *, is_own: Callable[[], bool]) -> None:
        """``is_own()``: whether the script has led here by itself, and no framework."""
        self._worker, self._is_own = worker, is_own
        # Each call's name, and what was in its tensors; None for what is not kept.
        self._kept: deque[tuple[str, list[torch.Tensor] | None]] = deque()
        self._bytes = 0
        if worker.detached and "called" in worker.job_constants:
            told = decode(base64.b64decode(worker.job_constants["called"]), _WHAT)
            self._kept.extend((call, tensors) for call, tensors in told)
        worker.links.body = self

    def end(self) -> None:
        """The script trains from now on: have the job keep what was called."""
        self._worker.links.body = None
        if not self._worker.detached:
            told = encode([*self._kept], _WHAT)
            self._worker.remember(called=base64.b64encode(told).decode())

    def run(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Make a call; returns its Work."""
        return self.note(group, call, args, lambda *given: start(group))

    def note(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Make a call, and keep what it returns, or have it return what was kept."""
        worker = self._worker
        with worker.links.with_body(None):
            work = start(*args)
            if call in _ALIKE and {*group.members} == {*worker.view.ranks} and self._is_own():
                work.wait()
                tensors = gathered_into(args) if call == "allgather" else work.result()
                (self._fill if worker.detached else self._keep)(call, tensors)
        return work

    def interrupted(self, call: str) -> None:
        """Before a job trains no call is made again."""

    def _keep(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes += sum(one.nbytes for one in tensors)
        is_kept = self._bytes <= _LARGEST
        copies = [one.detach().cpu().clone() for one in tensors] if is_kept else None
        self._kept.append((call, copies))

    def _fill(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        """Have a call return what the others' did; another call is as the worker alone has it."""
        known, kept = self._kept.popleft() if self._kept else ("", None)
        if kept is None or known != call or shapes_of(kept) != shapes_of(tensors):
            return
        fill(tensors, kept)
