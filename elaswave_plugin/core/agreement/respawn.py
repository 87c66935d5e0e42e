"""The decision whether and when to start a lost trainer again on its slot (pure).

>>> history = Deaths(limit=5)
>>> print(history.after_death(step=7))
start again in 0.5 s
>>> print(history.after_death(step=9))
start again in 1 s
>>> print(history.after_death(step=9))
start again in 2 s
>>> print(history.after_death(step=9))
give up: 3 trainers died at step 9, which is a bug of the program or a broken device
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# The survivors' recovery goes first: building a trainer takes processor time.
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_SAME_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """The order to start the next incarnation after ``after_s`` seconds."""

    after_s: float

    def __str__(self) -> str:
        return f"start again in {self.after_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The order to leave the slot empty."""

    reason: str

    def __str__(self) -> str:
        return f"give up: {self.reason}"


class Deaths:
    """The deaths on one slot; ``limit``: the most times that it is started again."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._count = 0
        self._at_step: Counter[int] = Counter()

    def after_death(self, *, step: int) -> StartAgain | GiveUp:
        """Decide what follows the death of a trainer in ``step``."""
        self._at_step[step] += 1
        if self._count == self.limit:
            return GiveUp(reason=f"it was started again {self.limit} times, the limit of respawn")
        if self._at_step[step] == _SAME_STEP:
            return GiveUp(
                reason=f"{_SAME_STEP} trainers died at step {step}, which is a bug of the program "
                "or a broken device"
            )
        self._count += 1
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (self._count - 1))
        return StartAgain(after_s=delay_s)
