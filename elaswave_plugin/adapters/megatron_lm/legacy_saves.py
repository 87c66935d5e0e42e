"""Checkpoints of the format torch, written beside their place by Megatron-LM's own save.

Its names of files lead into a draft, and its tracker's line waits until that has its name: a save
that a loss tears leaves nothing behind, and starts again.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from elaswave_plugin.checkpoints.directory import MEGATRON_TRACKER
from elaswave_plugin.checkpoints.legacy import flaw_of
from elaswave_plugin.recovery.drafts import Drafts
from elaswave_plugin.values.set_within import set_within


class LegacySaves:
    """The place of the files of a save in progress; their own without one."""

    def __init__(self) -> None:
        self._place = self._draft = Path()
        self.is_open = False
        """Whether a save is in progress."""
        self._lines: list[tuple[Path, str]] = []

    def write(self, drafts: Drafts, place: Path, save: Callable[[], None]) -> None:
        """Have Megatron-LM write the checkpoint of ``place``; collective over WORLD.

        Raises OSError for what the system refuses.
        """

        def write(draft: Path) -> None:
            self._place, self._draft, self._lines = place, draft, []
            with set_within(self, "is_open", True):
                save()

        drafts.write(place, write, flaw_of, pointer=place.with_name(MEGATRON_TRACKER))
        for path, text in self._lines:
            with drafts.pointing_to(path) as tracker:
                tracker.write(text)
        dist.barrier()

    def name(self, path: str) -> str:
        """Return where a file of the checkpoint is written now."""
        if self.is_open and Path(path).is_relative_to(self._place):
            return str(self._draft / Path(path).relative_to(self._place))
        return path

    @contextlib.contextmanager
    def hold(self, path: Path) -> Iterator[TextIO]:
        """Open the tracker, which changes when the checkpoint has its name."""
        text = io.StringIO()
        yield text
        self._lines.append((path, text.getvalue()))
