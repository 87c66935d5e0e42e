"""The checkpoints that the workers of a job write together, or give up where the storage fails."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elaswave_plugin.checkpoints.draft import (
    Attempt,
    begin_draft,
    begin_pointer,
    discard_drafts,
    pointing_to,
    publish,
)
from elaswave_plugin.checkpoints.failures import storage_failure
from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered

Result = TypeVar("Result")


class Drafts:
    """Has every attempt at a checkpoint write into a folder of its own (collective over WORLD)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The place of the checkpoint that is being written, or was when the attempt ended.
        self.place: Path | None = None
        self._pointer: Path | None = None

    def write(
        self,
        place: Path,
        write: Callable[[Path], Result],
        flaw_of: Callable[[Path], str | None],
        *,
        pointer: Path | None,
    ) -> Result:
        """Have ``write(folder)`` write a checkpoint, which then gets the name ``place``.

        ``flaw_of(folder)`` says what keeps it from being read; ``pointer``: the file that will be
        opened by ``pointing_to``. Raises OSError for what the system refuses and for a checkpoint
        with a flaw; ``discard`` takes the rest away.
        """
        self.place, self._pointer = place, pointer
        writes = dist.get_rank() == 0
        attempt = self._attempt
        if writes:
            begin_draft(place, attempt)
            if pointer is not None:
                begin_pointer(pointer, attempt)
        dist.barrier()
        draft = attempt.draft_of(place)
        with self._worker.phases.writing(draft):
            result = write(draft)
            dist.barrier()
        # A fault that strikes once all is written strikes before that has its name.
        dist.barrier()
        if writes:
            flaw = flaw_of(draft)
            if flaw is not None:
                raise OSError(f"what was written cannot be read: {flaw}")
            publish(place, attempt)
        dist.barrier()
        return result

    def discard(self, place: Path | None) -> None:
        """Take away what the attempts at a checkpoint have left; on rank 0, for all."""
        if place is not None and dist.get_rank() == 0:
            discard_drafts(place, self._attempt)
            if self._pointer is not None:
                discard_drafts(self._pointer, self._attempt)

    def name(self, pointer: Path, text: str) -> None:
        """Have a script's own small file name the newest checkpoint."""
        self._pointer = pointer
        writes = dist.get_rank() == 0
        if writes:
            begin_pointer(pointer, self._attempt)
        dist.barrier()
        if writes:
            with self.pointing_to(pointer) as file:
                file.write(text)

    def pointing_to(self, pointer: Path) -> AbstractContextManager[TextIO]:
        """Open the small file that names the checkpoint just written; on rank 0, for all."""
        return pointing_to(pointer, self._attempt)

    @property
    def _attempt(self) -> Attempt:
        """The attempt of this view: an interrupted one is made again in another view."""
        worker = self._worker
        return Attempt(worker.launch_id, worker.view.epoch, ask=worker.member.await_lease)


class FailedSave(NamedTuple):
    """A failed save: the work between steps, the worker's slot, and the system's words to it."""

    work: int
    slot: int
    words: str


class FailedSaves:
    """The failed saves that one worker knows of: all give them up together, and the job goes on.

    The worker that fails cannot tell the others, which wait for it in a collective of the save. So
    it has the view renewed, as for a broken link: that takes all workers out of the save, and after
    the recovery, which loses none, all learn why.
    """

    def __init__(self, worker: Worker, drafts: Drafts) -> None:
        self._worker = worker
        self._drafts = drafts
        self._own: FailedSave | None = None
        self._agreed: FailedSave | None = None

    @property
    def has_failed(self) -> bool:
        """True if this worker's own attempt at a save failed, and the others do not know yet."""
        return self._own is not None

    def attempt(self, save: Callable[[], Result], work: int) -> Result | None:
        """Write a checkpoint, as the work of this number; None where it has failed.

        Raises EpochChanged where it fails now, once the view is renewed.
        """
        if self._agreed is not None and self._agreed.work == work:
            self._give_up(self._agreed)
            return None
        # A failure from here on comes while all workers are in this work.
        dist.barrier()
        self._drafts.place = None
        try:
            result = save()
            if self._drafts.place is None:
                # Files of the script's own, which are written now.
                self._worker.phases.fire(SAVE_PHASE)
            return result
        except (Exception, CheckpointException) as error:
            place = self._drafts.place
            words = storage_failure(error, None if place is None else place.parent)
            if words is None:
                raise
        self._own = FailedSave(work, self._worker.slot, words)
        member = self._worker.member
        why = f"worker {self._worker.slot} could not save: {words}"
        member.severed(self._worker.view.epoch, why)
        member.await_proposal(self._worker.config.transfer_timeout_s)

    def agree(self) -> None:
        """Learn why a save failed (collective over WORLD)."""
        everyone = gathered(None if self._own is None else tuple(self._own))
        failed = [FailedSave(*one) for one in everyone if one is not None]
        # Of torch's coordinated failures only one worker knows why.
        self._agreed = max(failed, key=lambda one: (one.work, bool(one.words), -one.slot))
        self._own = None

    def _give_up(self, failed: FailedSave) -> None:
        """Take the half away and say so, once for the job."""
        worker, place = self._worker, self._drafts.place
        self._drafts.discard(place)
        fields: dict[str, Any] = {"slot": failed.slot, "reason": failed.words}
        if not worker.owns_rank_0:
            return
        worker.events.emit("save_failed", step=worker.completed, place=str(place or ""), **fields)
        print(
            f"elaswave: the checkpoint of step {worker.completed} was not saved"
            f"{f' to {place}' if place else ''}: worker {failed.slot}: {failed.words}; the one "
            "before it stays the newest, and training goes on",
            flush=True,
        )
