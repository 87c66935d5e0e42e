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

from collections.abc import Iterable
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
    """The deaths on one slot, by their ``steps``; ``limit``: the most times it is started again."""

    def __init__(self, *, limit: int, steps: Iterable[int] = ()) -> None:
        self.limit = limit
        self.steps = list(steps)

    def after_death(self, *, step: int) -> StartAgain | GiveUp:
        """Decide what follows the death of a trainer in ``step``."""
        before = len(self.steps)
        self.steps.append(step)
        if before == self.limit:
            return GiveUp(reason=f"it was started again {self.limit} times, the limit of respawn")
        if self.steps.count(step) == _SAME_STEP:
            return GiveUp(
                reason=f"{_SAME_STEP} trainers died at step {step}, which is a bug of the program "
                "or a broken device"
            )
        return StartAgain(after_s=min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**before))
