"""Collectives that a script calls between two steps, in the body of its loop.

That body cannot be called again. All-reduces, broadcasts and barriers of all workers are work that
starts again after a loss, as `CallLog.run` does it: if one worker has left it with its result,
so do all. Any other collective that a loss interrupts ends the job with a sentence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.call_record import CallRecord
from elaswave_plugin.trainer.fatal import end_in_a_sentence, ends_in_a_sentence

_GATHER = "allgather"


class LoopBody:
    """The body of a script's loop: whether the script is in it, and what collectives do there."""

    def __init__(
        self,
        loop: CallLog,
        record: CallRecord | None = None,
        *,
        scale: Callable[[Sequence[int]], float] = lambda members: 1.0,
    ) -> None:
        """``record``: what these calls return is noted there, for those who come later.

        ``scale(members)``: what makes a mean over a group's members that of the launch.
        """
        self._loop = loop
        self._record = record
        self._scale = scale
        self._worker = loop.worker

    def begin(self) -> None:
        """Begin the body, which lasts until the script ends."""
        self._worker.links.body = self

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the body runs."""
        self._worker.links.body = self
        try:
            yield
        finally:
            self._worker.links.body = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, a verb of the job runs, in the body or not."""
        before, self._worker.links.body = self._worker.links.body, None
        try:
            yield
        finally:
            self._worker.links.body = before

    def run(self, group: Any, call: str, args: Sequence[Any], start: Callable[[], Any]) -> Any:
        """Complete a call of all workers, through any number of losses; returns its Work.

        ``start()`` begins it with ``args``, whose tensors it changes. Ends the job where it cannot
        be made again.
        """
        if self._is_behind or set(group.members) != set(self._worker.view.ranks):
            return self.note(group, call, args, lambda *given: start())
        tensors = _tensors(args)
        before = [tensor.detach().clone() for tensor in tensors]
        root = getattr(args[1], "rootRank", args[1]) if call == "broadcast" else 0
        source = group.members[root]

        def work() -> Any:
            if call == "broadcast" and group.members[root] != source:
                self.interrupted(call)
            for tensor, value in zip(tensors, before, strict=True):
                tensor.detach().copy_(value)
            started = start()
            started.wait()
            return self._scaled(group, call, args, started)

        with self.closed():
            completed: Any = self._loop.run(work, phase=call)
        self._note(call, completed)
        return completed

    def note(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Make a call, and note what it returns; or have in its tensors what the others had there.

        An all-gather into as many tensors as there were workers at the launch leaves those of lost
        ones as they are. Returns its Work.
        """
        outputs = gathered_into(args) if call == _GATHER and self._record is not None else None
        if self._is_behind:
            return self._passed_over(group, call, args, start, outputs)
        slots = self._worker.launch_slots
        if outputs is not None and len(outputs) == len(slots) > len(group.members):
            args = ([outputs[slots.index(slot)] for slot in group.members], *args[1:])
        with self.closed():
            started = self._scaled(group, call, args, start(*args))
        self._note(call, started, outputs)
        return started

    def _scaled(self, group: Any, call: str, args: Sequence[Any], work: Any) -> Any:
        """Make a mean over fewer workers than at the launch that of these."""
        is_mean = call == "allreduce" and group.reduction(*args[1:2]) == "AVG"
        if is_mean and (scale := self._scale(group.members)) != 1.0:
            work.wait()
            for tensor in _tensors(args):
                tensor.detach().mul_(scale)
        return work

    @property
    def _is_behind(self) -> bool:
        return self._loop.is_lagging if self._record is None else self._record.is_behind

    def _note(self, call: str, work: Any, outputs: Sequence[torch.Tensor] | None = None) -> None:
        if self._record is not None:
            work.wait()
            self._record.note(call, work.result() if outputs is None else outputs)

    @ends_in_a_sentence
    def _passed_over(
        self,
        group: Any,
        call: str,
        args: Sequence[Any],
        start: Callable[..., Any],
        outputs: Sequence[torch.Tensor] | None,
    ) -> Any:
        """Have a call answered here, and by what the others had there, if that is known."""
        if outputs is not None:
            # They were more or fewer then.
            like = args[1] if isinstance(args[1], torch.Tensor) else args[1][0]
            args = ([torch.empty_like(like) for _ in group.members], *args[1:])
        links = self._worker.links
        before, links.detached = links.detached, True
        try:
            with self.closed():
                started = start(*args)
        finally:
            links.detached = before
        if self._record is not None:
            found = started.result() if outputs is None else outputs
            self._record.fill(call, [one.detach() for one in found])
        return started

    def interrupted(self, call: str) -> NoReturn:
        """A loss has met a call that cannot be made again."""
        end_in_a_sentence(
            ConfigurationError(
                f"a loss met {call} in the body of job.train's loop, which cannot be called again: "
                f'put what needs it into a function, and call job.run(function, phase="{call}")'
            )
        )


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    if not args or not isinstance(args[0], torch.Tensor | list | tuple):
        return []
    return [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])


def gathered_into(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of an all-gather that it writes to."""
    outputs = args[0]
    return [*outputs] if isinstance(outputs[0], torch.Tensor) else [*outputs[0]]
