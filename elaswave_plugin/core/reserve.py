"""Slots beyond those of the launch: they have nobody until somebody joins the job in them (pure).

A job of width 4 with a reserve of 2 has the slots 0 to 5. The first view has 0 to 3; to the
agreement 4 and 5 are slots without a supervisor, as if theirs had been lost. Global batch, gradient
scale and the order of additions are those of the launch, whatever the reserve.

>>> vacant((0, 0, 1, NOWHERE, NOWHERE))
(3, 4)
>>> built_among(4, (0, 1, 2)), built_among(1, (0, 1, 2))
((0, 1, 4), (0, 1, 2))
"""

from __future__ import annotations

from collections.abc import Sequence

# The node of a slot in which nobody has been.
NOWHERE = -1
NOBODY_CAME = "nobody has joined in this slot of the reserve"


def vacant(nodes: Sequence[int]) -> tuple[int, ...]:
    """The slots in which nobody has been, by the node of every slot."""
    return tuple(slot for slot, node in enumerate(nodes) if node == NOWHERE)


def built_among(slot: int, homes: Sequence[int]) -> tuple[int, ...]:
    """The slots of the world in which a worker builds: as many as at the launch, in rank order.

    One beyond the launch stands where the last of the launch does.
    """
    return tuple(homes) if slot in homes else (*homes[:-1], slot)
