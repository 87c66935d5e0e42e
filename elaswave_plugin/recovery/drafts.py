"""The checkpoints that the workers of a job write together, beside their places until whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO, TypeVar

import torch.distributed as dist

from elaswave_plugin.checkpoints.draft import (
    Attempt,
    begin_draft,
    begin_pointer,
    discard_drafts,
    pointing_to,
    publish,
)
from elaswave_plugin.recovery.worker import Worker

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
