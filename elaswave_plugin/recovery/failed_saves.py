"""A save that the storage fails: all workers give it up together, and the job goes on.

The worker that fails cannot tell the others, which wait for it in a collective of the save. So it
has the view renewed, as for a broken link: that takes all workers out of the save, and after the
recovery, which loses none, all learn why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elaswave_plugin.checkpoints.failures import storage_failure
from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.recovery.drafts import Drafts
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.gathered import gathered

Result = TypeVar("Result")


class FailedSave(NamedTuple):
    """A failed save: the work between steps, the worker's slot, and the system's words to it."""

    work: int
    slot: int
    words: str


class FailedSaves:
    """The failed saves that one worker knows of."""

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
