"""The handshake after a recovery: workers that have been in the script's loop tell later ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.recovery.notes import Notes
from elaswave_plugin.values.gathered import gathered

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
