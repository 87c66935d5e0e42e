"""The checkpoints that the workers of a job write together, beside their places until whole."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from elaswave_plugin.checkpoints.draft import begin_draft, discard_drafts, draft_of, publish
from elaswave_plugin.recovery.worker import Worker

Result = TypeVar("Result")


class Drafts:
    """Has every attempt at a checkpoint write into a folder of its own (collective over WORLD)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The place of the checkpoint that is being written, or was when the attempt ended.
        self.place: Path | None = None

    def write(
        self,
        place: Path,
        write: Callable[[Path], Result],
        flaw_of: Callable[[Path], str | None],
    ) -> Result:
        """Have ``write(folder)`` write a checkpoint, which then gets the name ``place``.

        ``flaw_of(folder)`` says what keeps it from being read. Raises OSError for what the system
        refuses and for a checkpoint with a flaw; ``discard`` takes the rest away.
        """
        self.place = place
        writes = dist.get_rank() == 0
        # A view has one attempt: an interrupted one is made again in another.
        attempt = f"{self._worker.run_id}-{self._worker.view.epoch}"
        if writes:
            begin_draft(place, attempt)
        dist.barrier()
        draft = draft_of(place, attempt)
        with self._worker.phases.writing(draft):
            result = write(draft)
            dist.barrier()
        # A fault that strikes once all is written strikes before that has its name.
        dist.barrier()
        if writes:
            flaw = flaw_of(draft)
            if flaw is not None:
                raise OSError(f"what was written cannot be read: {flaw}")
            publish(draft, place)
        dist.barrier()
        return result

    def discard(self, place: Path | None) -> None:
        """Take away what the attempts at a checkpoint have left; on rank 0, for all."""
        if place is not None and dist.get_rank() == 0:
            discard_drafts(place)
