"""Which workers are slow: by their pace against that of the others with the same layers.

A pace is seconds per layer and token, of the fastest forward pass of a step: so that neither the
length of sequences nor a processor that others use for a moment makes a worker slow.

>>> watch = SlowWatch()
>>> for step in range(4):
...     changed = watch.step({0: 1e-6, 1: 1.6e-6, 2: 1e-6}, [(0, 1, 2)])
>>> print(watch.slow[1])
takes 1.60x as long for a layer as workers 0, 2, which have the same ones, in 4 steps in a row
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 1.3
LEVEL = 1.15
STEPS_TO_NAME = 4
"""In a row, also to take it back: the pace of a step is known in the next one, the fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A slow worker: its pace over the median of its ``peers`` when it was named."""

    ratio: float
    peers: tuple[int, ...]

    def __str__(self) -> str:
        several = "s" if len(self.peers) > 1 else ""
        have = "have" if several else "has"
        return (
            f"takes {self.ratio:.2f}x as long for a layer as worker{several}"
            f" {', '.join(map(str, self.peers))}, which {have} the same ones, in {STEPS_TO_NAME}"
            " steps in a row"
        )


class SlowWatch:
    """The slow workers of a job by slot; alike on all that have seen the same steps."""

    def __init__(self) -> None:
        self.slow: dict[int, Slow] = {}
        self._row: dict[int, int] = {}

    def restart(self) -> None:
        """Who has which layers has changed: forget everything."""
        self.slow.clear()
        self._row.clear()

    def step(self, paces: Mapping[int, float], roles: Iterable[Sequence[int]]) -> bool:
        """Judge a step; whether other workers are slow now.

        ``paces``: by slot, without those that are not known. ``roles``: slots with the same layers.
        """
        before = set(self.slow)
        for role in roles:
            known = [slot for slot in role if slot in paces]
            for slot in known if len(known) > 1 else ():
                peers = tuple(sorted(one for one in known if one != slot))
                self._judge(slot, paces[slot] / median(paces[one] for one in peers), peers)
        return before != set(self.slow)

    def _judge(self, slot: int, ratio: float, peers: tuple[int, ...]) -> None:
        against = ratio < LEVEL if slot in self.slow else ratio >= SLOW
        self._row[slot] = self._row.get(slot, 0) + 1 if against else 0
        if self._row[slot] < STEPS_TO_NAME:
            return
        self._row[slot] = 0
        if slot in self.slow:
            del self.slow[slot]
        else:
            self.slow[slot] = Slow(ratio=ratio, peers=peers)
