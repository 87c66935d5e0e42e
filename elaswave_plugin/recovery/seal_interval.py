"""Steps from one seal to the next: as many as it takes for the wait for seals to be a small part.

A seal is written beside the passes of the next step, whose update waits for what is left of it.

>>> fit = SealInterval()
>>> for _ in range(STEPS_TO_JUDGE):
...     fit.note_wait(0.2)
...     fit.note_step(1.2)
>>> fit.wanted
4
"""

from collections import deque
from math import ceil
from statistics import median

WAIT_SHARE, LEAST_WAIT_S = 0.05, 0.05
"""The part of a step that waiting for seals may take, and what is never too long."""
STEPS_TO_JUDGE, STEPS_REMEMBERED = 8, 16
MOST_STEPS = 32


class SealInterval:
    """One worker's measurements: the waits of updates for a seal, and steps."""

    def __init__(self) -> None:
        self._waits_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._waited_s = 0.0

    def note_wait(self, seconds: float) -> None:
        """Note what the update of the present step has waited for a seal."""
        self._waits_s.append(seconds)
        self._waited_s = seconds

    def note_step(self, seconds: float) -> None:
        """Note a step, its wait included."""
        self._steps_s.append(seconds - self._waited_s)
        self._waited_s = 0.0

    def interrupt(self) -> None:
        """A step was interrupted: its wait says nothing."""
        self._waited_s = 0.0

    @property
    def wanted(self) -> int:
        """The steps from one seal to the next; 1 as long as too little is known."""
        if min(len(self._waits_s), len(self._steps_s)) < STEPS_TO_JUDGE:
            return 1
        bearable_s = WAIT_SHARE * median(self._steps_s)
        wait_s = median(self._waits_s)
        if wait_s <= max(bearable_s, LEAST_WAIT_S):
            return 1
        return min(MOST_STEPS, ceil(wait_s / bearable_s))
