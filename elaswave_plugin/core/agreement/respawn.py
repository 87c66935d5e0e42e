"""The decision whether and when to start a lost trainer again on its slot (pure).

>>> [delay_or_reason([7], limit=5), delay_or_reason([7, 9], limit=5)]
[0.5, 1.0]
>>> delay_or_reason([7, 9, 9, 9], limit=5)
'3 trainers died at step 9: see what they have printed, and the device; it may join again later'
>>> delay_or_reason([7, 9], limit=1)
'it was started again 1 times, the limit of respawn'
"""

from __future__ import annotations

from collections.abc import Sequence

# The survivors' recovery goes first: building a trainer takes processor time.
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_SAME_STEP = 3


def delay_or_reason(deaths: Sequence[int], *, limit: int) -> float | str:
    """Return after how many seconds the next trainer starts, or why the slot stays empty.

    ``deaths``: the step of each on this slot, the newest last; ``limit``: of the starts.
    """
    before, step = len(deaths) - 1, deaths[-1]
    if before == limit:
        return f"it was started again {limit} times, the limit of respawn"
    if deaths.count(step) == _SAME_STEP:
        same = f"{_SAME_STEP} trainers died at step {step}"
        return f"{same}: see what they have printed, and the device; it may join again later"
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0**before)
