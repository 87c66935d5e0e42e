"""Long sequences of numbers as text: runs of equal steps, which lists of ranks and nodes are.

>>> runs_text([0, 1, 2, 3, 8, 10, 12, 7, 7, 7])
'0+1*4 8+2*3 7+0*3'
>>> numbers_of('0+1*4 8+2*3 7+0*3')
(0, 1, 2, 3, 8, 10, 12, 7, 7, 7)
"""

import re
from collections.abc import Sequence
from functools import lru_cache

MOST_NUMBERS = 1 << 20
_RUN = re.compile(r"(-?\d+)\+(-?\d+)\*(\d{1,8})")
# As long as the lists are few, alike on many workers, and the same from one view to the next.
_KEPT = 64


def runs_text(numbers: Sequence[int]) -> str:
    """Return the text of some numbers, one or more."""
    runs = []
    first = last = numbers[0]
    step, count = 0, 1
    for number in numbers[1:]:
        if count == 1 or number - last == step:
            step, count, last = number - last, count + 1, number
        else:
            runs.append(f"{first}+{step}*{count}")
            first, last, step, count = number, number, 0, 1
    return " ".join((*runs, f"{first}+{step}*{count}"))


@lru_cache(_KEPT)
def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers that a text names; raises ValueError where it is none of `runs_text`."""
    found: list[int] = []
    for one in text.split(" "):
        match = _RUN.fullmatch(one)
        if match is None:
            raise ValueError(f"{one!r:.60} is no run of numbers")
        first, step, count = map(int, match.groups())
        if len(found) + count > MOST_NUMBERS:
            raise ValueError(f"{text!r:.60} are more than {MOST_NUMBERS} numbers")
        found += range(first, first + step * count, step) if step else [first] * count
    return tuple(found)
