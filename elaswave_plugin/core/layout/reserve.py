"""The slots beyond those of the launch, empty until workers join the job in them (pure).

A job of width 4 with a reserve of 2 has the slots 0 to 5. The first view has 0 to 3; to the
agreement 4 and 5 are slots without an agent, as if theirs had been lost. Global batch, gradient
scale and the order of additions are those of the launch, independent of the reserve.

>>> vacant((0, 0, 1, NOWHERE, NOWHERE))
(3, 4)
>>> built_among(4, (0, 1, 2)), built_among(1, (0, 1, 2))
((0, 1, 4), (0, 1, 2))

With TP and PP they are filled by pipeline, then by stage, then by tp position: beyond TP2 x PP2 x
DP2, 8 and 9 make another replica of stage 0, 10 and 11 one of stage 1.

>>> grown_coordinate(10, width=8, tp=2, pp=2), grown_coordinate(13, width=8, tp=2, pp=2)
(Coordinate(stage=1, order=2, tp=0), Coordinate(stage=0, order=3, tp=1))
>>> built_among(9, range(8), tp=2, pp=2)
(0, 1, 2, 9, 4, 5, 6, 7)
"""

from collections.abc import Sequence

from elaswave_plugin.core.layout.layout import Coordinate

# The node of a slot in which nobody has been.
NOWHERE = -1
NOBODY_CAME = "no worker has joined in this slot of the reserve"


def vacant(nodes: Sequence[int]) -> tuple[int, ...]:
    """List the slots in which no worker has been, from the node of every slot."""
    return tuple(slot for slot, node in enumerate(nodes) if node == NOWHERE)


def grown_coordinate(slot: int, *, width: int, tp: int, pp: int) -> Coordinate:
    """Return the place of a slot beyond the ``width`` workers of the launch."""
    group, position = divmod(slot - width, tp)
    return Coordinate(stage=group % pp, order=width // (tp * pp) + group // pp, tp=position)


def grown_replicas(reserve: int, *, tp: int, pp: int) -> int:
    """Return how many more replicas a stage may have with ``reserve`` more workers."""
    return -(-reserve // (tp * pp))


def built_among(
    slot: int, launch_slots: Sequence[int], *, tp: int = 1, pp: int = 1
) -> tuple[int, ...]:
    """Return the slots of the world in which a worker builds: as many as at launch, by rank.

    A slot of the reserve replaces the last replica of its stage and tp position.
    """
    if slot in launch_slots:
        return tuple(launch_slots)
    coordinate = grown_coordinate(slot, width=len(launch_slots), tp=tp, pp=pp)
    rank = (coordinate.stage + 1) * (len(launch_slots) // pp) - tp + coordinate.tp
    return (*launch_slots[:rank], slot, *launch_slots[rank + 1 :])
