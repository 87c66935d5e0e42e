"""The script's loop, told to a worker that comes later: by those that were there, or by notes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.ipc.snapshot_record import NOTES
from elaswave_plugin.recovery.place import Place
from elaswave_plugin.values.plain import gathered, packed, unpacked

_WHAT = "what a worker knows of the script's loop"


class Notes:
    """The notes on the script's loop of one worker, and those that it finds.

    Newcomers are told by those that were there. Where all of these are lost before they have told,
    the notes say it: they lie with the snapshots, and outlive the worker as these do. Others enter
    between two steps; who goes on where the last one was lost in a step begins with that one.
    """

    def __init__(self, worker: Place) -> None:
        self._worker = worker
        self._tell: dict[str, Callable[[int], Any]] = {}
        self._found: list[SealedShard] = []
        self._read: dict[str, Any] | None = None

    def add(self, name: str, tell: Callable[[int], Any]) -> None:
        """Have ``tell(step)`` noted by this name: a plain value, before that step."""
        self._tell[name] = tell

    def leave(self, step: int, epoch: int) -> None:
        """Leave notes before ``step``, where others enter in view ``epoch``, if nobody else can."""
        if self._worker.state.is_alone:
            self._worker.state.seal_notes(self._packed(step), step=step, epoch=epoch)

    def leave_in(self, step: int) -> None:
        """Leave them as a step begins in which this worker may be lost while another one waits.

        Not where they would take memory that the step may need.
        """
        worker, state = self._worker, self._worker.state
        is_full = len(worker.view.ranks) == worker.most
        if state.is_alone and state.is_sealed(step) and not is_full:
            notes = self._packed(step)
            if state.has_room_for(notes):
                state.seal_notes(notes, step=step, epoch=worker.view.epoch)

    def _packed(self, step: int) -> bytes:
        return packed({name: tell(step) for name, tell in self._tell.items()}, _WHAT)

    def find(self, inventory: Iterable[SealedShard]) -> None:
        """A view was committed with all that is sealed: find the notes among it, newest first."""
        found = [one for one in inventory if one.buffer in NOTES]
        self._found = sorted(found, key=lambda one: (one.age, one.holder), reverse=True)
        self._read = None

    def last_step(self, facts: Mapping[int, WorkerFacts]) -> float:
        """Return the step beyond which nobody knows the loop, by the facts of a view's workers.

        Of a worker that was alone in its part of the model and is lost, that is the last one before
        which it left notes. Alike on all workers.
        """
        knowing = {slot: told for slot, told in facts.items() if told.step}
        left = [one for one in self._found if one.owner not in knowing]
        placed = (told.placed_epoch for told in knowing.values())
        since = max(placed, default=left[0].epoch if left else 0)
        noted = {one.owner: one.step for one in reversed(left) if one.epoch >= since}
        reached = [max(told.step for told in knowing.values())] if knowing else []
        return min((*noted.values(), *reached), default=math.inf)

    def are_of(self, shard_group: tuple[int, int]) -> bool:
        """Return whether a worker of that part of the model has left any before the present step.

        Alike on all workers.
        """
        step = self._worker.completed
        return any((one.step, one.shard_group) == (step, shard_group) for one in self._found)

    def read(self, name: str) -> Any:
        """Return what was noted before the present step, of the own part of the model if there.

        Raises ElasWaveError where nothing was, SnapshotUnreadableError.
        """
        if self._read is None:
            group = self._worker.placement.shard_group_of(self._worker.slot)
            key = None if group is None else group.key
            here = [one for one in self._found if one.step == self._worker.completed]
            here.sort(key=lambda one: one.shard_group != key)
            if not here:
                raise ElasWaveError(
                    "all workers that knew the state of the script's loop were lost before this one"
                    " joined; restart from the last checkpoint"
                )
            self._read = unpacked(self._worker.read_capsule(here[0]), _WHAT)
        return self._read[name]

    @property
    def were_read(self) -> bool:
        """True if this worker knows the loop from notes, in the present view."""
        return self._read is not None


_NAME = "the script's loop"


class Handshake:
    """One worker's part: it knows where the loop is, unless it has joined and was not told yet."""

    def __init__(
        self,
        notes: Notes,
        *,
        knows: bool,
        tell: Callable[[], Any],
        follow: Callable[[Sequence[Any]], None],
    ) -> None:
        """``tell()`` is what this worker knows: a plain value, and not None.

        ``follow(told)`` is called on every worker where one has come; ``told``: by rank, None for
        those, and behind the last rank what is in ``notes`` where nobody knows. It may
        communicate, and is called again after the next recovery if interrupted.
        """
        self._notes, self._knows, self._tell, self._follow = notes, knows, tell, follow
        notes.add(_NAME, lambda step: tell())

    def exchange(self, *flags: bool) -> list[bool]:
        """Tell, and be told (collective over WORLD); returns which flags any worker has.

        Workers come between two steps, where all are about to complete the same one.
        Raises ElasWaveError where none is left that knows.
        """
        asked = torch.tensor([not self._knows, *flags], dtype=torch.int64)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if int(asked[0]):
            told = gathered(self._tell() if self._knows else None)
            if all(one is None for one in told):
                told.append(self._notes.read(_NAME))
            self._follow(told)
            self._knows = True
        return [bool(one) for one in asked[1:]]
