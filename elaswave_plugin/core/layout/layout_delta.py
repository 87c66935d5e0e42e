"""The layout as its differences from the launch, for a worker that joins later.

The layout after a membership change depends on measurements at that time, so it cannot be derived
from the changes alone.

>>> from elaswave_plugin.core.layout.group_rules import coordinates_of
>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> launch = launch_layout(tp=1, pp=2, dp=2, num_layers=4)
>>> told = layout_delta(launch.without([1]).recut((0, 1, 4)), coordinates_of(launch))
>>> told
{'cuts': [0, 1, 4], 'gone': [1]}
>>> print(layout_with(told, launch, coordinates_of(launch)))
TP1 x PP2 x DP2, 4 layers, widths 1 2
stage 0, layers 0: r0 w0
stage 1, layers 1-3: r0 w2 | r1 w3
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elaswave_plugin.core.layout.layout import Coordinate, FreeWorker, ParallelLayout, TpGroup


def layout_delta(
    layout: ParallelLayout, launch_coordinates: Mapping[int, Coordinate]
) -> dict[str, Any]:
    """Return a dict for JSON, short if few workers differ from their ``launch_coordinates``."""
    coordinates = {
        slot: (stage, group.replica, tp)
        for stage, groups in enumerate(layout.stages)
        for group in groups
        for tp, slot in enumerate(group.slots)
    }
    changed = {
        "gone": sorted(launch_coordinates.keys() - set(layout.workers)),
        "free": [list(worker) for worker in layout.free],
        "moved": [
            [slot, *coordinate]
            for slot, coordinate in sorted(coordinates.items())
            if coordinate != launch_coordinates.get(slot)
        ],
    }
    return {"cuts": list(layout.cuts), **{key: what for key, what in changed.items() if what}}


def layout_with(
    delta: Mapping[str, Any], like: ParallelLayout, launch_coordinates: Mapping[int, Coordinate]
) -> ParallelLayout:
    """Return the layout that `layout_delta` told; ``like``: one of the same job."""
    free = tuple(FreeWorker(*worker) for worker in delta.get("free", ()))
    absent = {*delta.get("gone", ()), *(worker.slot for worker in free)}
    coordinates = {
        slot: tuple(coordinate)
        for slot, coordinate in launch_coordinates.items()
        if slot not in absent
    }
    coordinates |= {slot: tuple(coordinate) for slot, *coordinate in delta.get("moved", ())}
    places = {coordinate: slot for slot, coordinate in coordinates.items()}
    groups: list[dict[int, list[int]]] = [{} for _ in like.stages]
    for stage, replica, tp in sorted(places):
        groups[stage].setdefault(replica, []).append(places[stage, replica, tp])
    stages = tuple(
        tuple(TpGroup(replica, tuple(slots)) for replica, slots in of_stage.items())
        for of_stage in groups
    )
    return replace(like, cuts=tuple(delta["cuts"]), stages=stages, free=free)
