"""Random draws as a function of (seed, step, micro-batch, layer, stream, tp): never of placement.

The key of a draw is a splitmix64 chain over its coordinates, so that a micro-batch draws the same
dropout masks on whichever worker runs it, and a layer keeps its masks when it moves.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def draw_key(*coordinates: int) -> int:
    """A 63-bit seed for the given coordinates; the order of the coordinates matters.

    >>> draw_key(1, 2) == draw_key(1, 2), draw_key(1, 2) == draw_key(2, 1)
    (True, False)
    """
    state = _GOLDEN
    for coordinate in coordinates:
        state = _splitmix64((state + (coordinate & _MASK) + _GOLDEN) & _MASK)
    return state >> 1
