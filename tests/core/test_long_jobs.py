"""A job of a month has many views: what a supervisor keeps and says does not grow with them."""

import pickle

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster

NODES = (0, 0, 1, 1, 2, 2)
EVENTS = {
    "trainers": ("exit 4 SIGKILL", "quiesce all", "respawn 4"),
    "supervisors": ("kill 5", "quiesce all", "join 5 {node}", "ready 5"),
    "wishes": ("replan 0",),
    "links": ("sever 3", "tick 2", "quiesce all"),
    "drains": (
        "notice 3 saves",
        "tick 2",
        "step all",
        "step all",
        "kill 3",
        "quiesce all",
        "join 3 {node}",
        "ready 3",
    ),
}

VIEWS = {"trainers": 2, "supervisors": 2, "wishes": 1, "links": 1, "drains": 2}


def month(kinds: tuple[str, ...], rounds: int) -> tuple[int, list[int]]:
    """Return the number of views, and the bytes that every supervisor keeps in the end."""
    cluster = Cluster(NODES, Timeouts())
    cluster.verbose = False
    for command in ("start", "quiesce all", "seal all"):
        cluster.do(command)
    node = 9
    for _ in range(rounds):
        for kind in kinds:
            node += 1
            for command in EVENTS[kind]:
                cluster.do(command.format(node=node))
            for command in ("step all",) * 4 + ("quiesce all",):
                cluster.do(command)
    assert len(cluster.alive) == len(NODES) and not cluster.ends
    return len(cluster.decided), [len(pickle.dumps(one)) for one in cluster.alive.values()]


@pytest.mark.parametrize("kinds", [*((kind,) for kind in EVENTS), tuple(EVENTS)], ids="-".join)
def test_what_a_supervisor_keeps_does_not_grow_with_the_views(kinds: tuple[str, ...]) -> None:
    few, sizes = month(kinds, 10)
    many, later_sizes = month(kinds, 40)
    assert many - few == 30 * sum(VIEWS[kind] for kind in kinds)
    for size, later in zip(sizes, later_sizes, strict=True):
        assert later <= size + 100  # the digits of its numbers
