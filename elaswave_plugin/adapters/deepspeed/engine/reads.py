"""Counts a script's calls of its loader: after a loss all survivors have made as many.

A loss finds survivors at different calls: one has the first batch of a step, another one waits for
it. For a script that counts its calls (a fixed number of ``next(iterator)``, ``enumerate`` and a
``break``) the step that all redo has to begin at the same call everywhere. So a script that has
made fewer is given what the others had, a void batch for a batch, until it has made as many.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.values.plain import gathered

# What a call was: an iterator, a batch, the end of an epoch.
ITERATOR, BATCH, END = "i", "b", "e"
_NOTHING = -1


class Reads:
    """The calls of one script, and those that it has yet to make to be where the others are."""

    def __init__(self, *, counts: bool) -> None:
        """``counts``: not of a worker that comes later, whose script has not seen all calls."""
        self._counts = counts
        self._made = 0
        # The last calls: those of the step that was completed last, and of the present one.
        self._recent = ""
        self._of_last_step = 0
        self._due = ""
        # Where the loader of the worker is that has made those calls.
        self._place_there: Any = None

    @property
    def due(self) -> str:
        """The kind of the next call that others have made, and this script has not; or nothing."""
        return self._due[:1]

    def made(self, kind: str) -> Any:
        """A call was made; returns where the loader is if it has caught up with others by it.

        A script that does anything else than the others did goes by other things than calls, as
        the steps of the engine: it is left alone.
        """
        self._made += 1
        self._recent += kind
        if not self._due:
            return None
        caught_up = self._due == kind
        self._due = self._due[1:] if self._due[0] == kind else ""
        return self._place_there if caught_up else None

    def completed_step(self) -> None:
        """A step was completed: calls of the one before it are no longer needed."""
        self._recent = self._recent[self._of_last_step :]
        self._of_last_step = len(self._recent)

    def tell(self) -> tuple[int, str, int]:
        """Return what `follow` needs to know on a worker that comes later."""
        return self._made, self._recent, self._of_last_step

    def follow(self, told: tuple[int, str, int]) -> None:
        """Count from where another worker is, whose calls this one's script passes over."""
        self._made, self._recent, self._of_last_step = told
        self._counts = True

    def compare(self, place: Any) -> None:
        """Find out how many calls others are ahead (collective over WORLD, after a recovery).

        ``place``: where the own loader is.
        """
        self._due = ""
        lowest = self._made if self._counts else torch.iinfo(torch.int64).max
        ends = torch.tensor([self._made if self._counts else _NOTHING, -lowest])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, fewest = int(ends[0]), -int(ends[1])
        if most in (fewest, _NOTHING):
            return
        mine = self._counts and self._made == most
        everyone = gathered((self._recent, place) if mine else None)
        if self._counts:
            self._catch_up(most, everyone)

    def _catch_up(self, most: int, everyone: Sequence[Any]) -> None:
        recent, self._place_there = next(told for told in everyone if told is not None)
        missing = most - self._made
        self._due = recent[-missing:] if 0 < missing <= len(recent) else ""
        # Those that are due count as they are made.
        self._made = most - len(self._due)
