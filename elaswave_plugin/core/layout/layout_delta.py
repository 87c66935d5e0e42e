"""The layout as its differences from the launch, for a worker that joins later.

The layout after a membership change depends on measurements at that time, so it cannot be derived
from the changes alone.

>>> from elaswave_plugin.core.layout.group_rules import seats_of
>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> launch = launch_layout(tp=1, pp=2, dp=2, num_layers=4)
>>> told = told_layout(launch.without([1]).recut((0, 1, 4)), seats_of(launch))
>>> told
{'cuts': [0, 1, 4], 'gone': [1]}
>>> print(layout_told(told, launch, seats_of(launch)))
TP1 x PP2 x DP2, 4 layers, widths 1 2
stage 0, layers 0: r0 w0
stage 1, layers 1-3: r0 w2 | r1 w3
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elaswave_plugin.core.layout.layout import FreeWorker, ParallelLayout, Seat, TpGroup


def told_layout(layout: ParallelLayout, homes: Mapping[int, Seat]) -> dict[str, Any]:
    """Return a dict for JSON, short if changes are few; ``homes``: seats at launch."""
    seats = {
        slot: (stage, group.replica, tp)
        for stage, groups in enumerate(layout.stages)
        for group in groups
        for tp, slot in enumerate(group.slots)
    }
    changed = {
        "gone": sorted(homes.keys() - set(layout.workers)),
        "free": [list(worker) for worker in layout.free],
        "moved": [[slot, *seat] for slot, seat in sorted(seats.items()) if seat != homes.get(slot)],
    }
    return {"cuts": list(layout.cuts), **{key: what for key, what in changed.items() if what}}


def layout_told(
    told: Mapping[str, Any], like: ParallelLayout, homes: Mapping[int, Seat]
) -> ParallelLayout:
    """Return the layout that `told_layout` told; ``like``: one of the same job."""
    free = tuple(FreeWorker(*worker) for worker in told.get("free", ()))
    absent = {*told.get("gone", ()), *(worker.slot for worker in free)}
    seats = {slot: tuple(seat) for slot, seat in homes.items() if slot not in absent}
    seats |= {slot: tuple(seat) for slot, *seat in told.get("moved", ())}
    places = {seat: slot for slot, seat in seats.items()}
    groups: list[dict[int, list[int]]] = [{} for _ in like.stages]
    for stage, replica, tp in sorted(places):
        groups[stage].setdefault(replica, []).append(places[stage, replica, tp])
    stages = tuple(
        tuple(TpGroup(replica, tuple(slots)) for replica, slots in of_stage.items())
        for of_stage in groups
    )
    return replace(like, cuts=tuple(told["cuts"]), stages=stages, free=free)
