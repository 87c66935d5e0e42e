"""Collectives that a script calls between two steps, in the body of its loop.

That body cannot be called again. All-reduces, broadcasts and barriers of all workers are work that
starts again after a loss, as `CallLog.run` does it: if one worker has left it with its result,
so do all. So are those of some workers, among who is left of them: after a recovery, who has left
one tells its result. Any other collective that a loss interrupts ends the job with a sentence.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.call_record import LARGEST, CallRecord
from elaswave_plugin.trainer.fatal import end_in_a_sentence, ends_in_a_sentence
from elaswave_plugin.values.plain import gathered
from elaswave_plugin.values.set_within import set_within

_GATHER = "allgather"


class LoopBody:
    """The body of a script's loop: whether the script is in it, and what collectives do there."""

    def __init__(
        self,
        loop: CallLog,
        record: CallRecord | None = None,
        *,
        scale: Callable[[Sequence[int]], float] = lambda members: 1.0,
        on_sum: Callable[[Sequence[int]], object] = lambda members: None,
    ) -> None:
        """``record``: what these calls return is noted there, for those who come later.

        ``scale(members)``: what makes a mean over a group's members that of the launch;
        ``on_sum(members)`` is called for each all-reduce.
        """
        self._loop = loop
        self._record = record
        self._scale, self._on_sum = scale, on_sum
        self._worker = loop.worker
        # By group of some workers: how many calls were completed, and what the last one returned;
        # here, and of any member after a recovery.
        self._completed: dict[str, tuple[int, Any]] = {}
        self._told: dict[str, tuple[int, Any]] = {}
        # Groups in which a broadcast has lost its source, which is said once.
        self._orphaned: set[str] = set()
        if record is not None:
            loop.after_recovery.append(self._tell)

    def begin(self) -> None:
        """Begin the body, which lasts until the script ends."""
        self._worker.links.body = self

    def open(self) -> AbstractContextManager[None]:
        """Inside, the body runs."""
        return self._worker.links.with_body(self)

    def closed(self) -> AbstractContextManager[None]:
        """Inside, a verb of the job runs, in the body or not."""
        return self._worker.links.with_body(None)

    def run(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Complete a call through any number of losses; returns its Work.

        ``start(group)`` begins it with ``args``, whose tensors it changes. Ends the job where it
        cannot be made again.
        """
        is_broadcast = call == "broadcast"
        of_some = not self._worker.groups.is_of_all(group)
        # A later worker knows how many calls there were by the record alone.
        is_made_again = not of_some or self._record is not None
        if self._is_behind or not is_made_again:
            completed = self.note(group, call, args, lambda *given: start(group))
            if of_some and is_made_again:
                self._complete(group, completed)
            return completed
        tensors = _tensors(args)
        before = [tensor.detach().clone() for tensor in tensors]
        root = getattr(args[1], "rootRank", args[1]) if is_broadcast else 0
        source, made = group.members[root], self._worker.groups.made_of(group)
        if of_some and source not in made:
            # Another has the place of the one that is gone.
            source = made[min(root, len(made) - 1)]

        def work() -> Any:
            if is_broadcast and not of_some and group.members[root] != source:
                self.interrupted(call)
            fill(tensors, before)
            left = self._left(group, call) if of_some else None
            if left is not None:
                fill(tensors, left)
                return _waited(start(self._alone(group, args if is_broadcast else ())))
            view = self._worker.view.epoch
            among = self._worker.groups.as_made(group, view=view) if of_some else group
            if of_some and is_broadcast:
                among = self._from(source, among, group, args)
            return self._scaled(among, call, args, _waited(start(among)))

        with self.closed():
            if of_some:
                completed = self._loop.beside(work)
                self._complete(group, completed)
            else:
                completed = self._loop.run(work, phase=call)
        self._note(call, completed)
        return completed

    # Of some workers, as the others are elsewhere: a group is that of those that it was made of.

    def _left(self, group: Any, call: str) -> Sequence[torch.Tensor] | None:
        """Return what a call gave to a member that has left it; None where nobody has."""
        known, results = self._told.get(group.group_name, (0, None))
        if known <= self._made(group):
            return None
        if results is None:
            self.interrupted(call)
        left: Sequence[torch.Tensor] = results
        return left

    def _from(self, source: int, among: Any, group: Any, args: Sequence[Any]) -> Any:
        """Return the group in which ``source`` gives what it has.

        Where that worker is gone it is this one alone, with what the last call gave.
        """
        _, results = self._completed.get(group.group_name, (0, None))
        if source not in among.members:
            tensors = _tensors(args)
            if results is not None and shapes_of(results) == shapes_of(tensors):
                fill(tensors, results)
            if group.group_name not in self._orphaned:
                self._orphaned.add(group.group_name)
                say(
                    f"worker {self._worker.slot}: a broadcast of the script has its source, worker"
                    f" {source}, no more: its tensor is as the last such call has left it"
                )
            return self._alone(group, args)
        args[1].rootRank = among.members.index(source)
        return among

    def _alone(self, group: Any, broadcast: Sequence[Any]) -> Any:
        """Return a group of this worker alone, which is the source of a ``broadcast`` by these."""
        if broadcast:
            broadcast[1].rootRank = 0
        return self._worker.groups.alone(group)

    def _made(self, group: Any) -> int:
        return self._completed.get(group.group_name, (0, None))[0]

    def _complete(self, group: Any, work: Any) -> None:
        results = work.result()
        is_kept = sum(one.nbytes for one in results) <= LARGEST
        kept = [one.detach().clone() for one in results] if is_kept else None
        self._completed[group.group_name] = self._made(group) + 1, kept

    def _tell(self) -> None:
        """Tell what the last call of each group returned (collective over WORLD)."""
        mine = [[name, *one] for name, one in self._completed.items()]
        self._told = {}
        for name, made, results in (one for told in gathered(mine) for one in told):
            if made > self._told.get(name, (0, None))[0]:
                self._told[name] = made, results

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
        if call == "allreduce":
            self._on_sum(group.members)
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
        with set_within(self._worker.links, "detached", True), self.closed():
            started = start(*args)
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


def _waited(work: Any) -> Any:
    work.wait()
    return work


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Return the shape of each."""
    return [one.shape for one in tensors]


def fill(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Have these values in the tensors."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    if not args or not isinstance(args[0], torch.Tensor | list | tuple):
        return []
    return [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])


def gathered_into(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of an all-gather that it writes to."""
    outputs = args[0]
    return [*outputs] if isinstance(outputs[0], torch.Tensor) else [*outputs[0]]
