"""A job of a month has many views: what an agent keeps and says does not grow with them."""

import pickle

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster

NODES = (0, 0, 1, 1, 2, 3)
EVENTS = {
    "trainers": ("exit 4 SIGKILL", "quiesce all", "respawn 4"),
    "nodes": ("kill {last}", "quiesce all", "join {node} 5", "ready 5"),
    "agents": ("restart all",),
    "wishes": ("replan 0",),
    "links": ("sever 3", "tick 2", "quiesce all"),
    "drains": (
        "notice 3 saves",
        "tick 2",
        "step all",
        "step all",
        "settle all",
        "join 0 3",
        "ready 3",
    ),
}

VIEWS = {"trainers": 2, "nodes": 2, "agents": 0, "wishes": 1, "links": 1, "drains": 2}


def month(kinds: tuple[str, ...], rounds: int) -> tuple[int, list[int]]:
    """Return the number of views, and the bytes that every agent keeps in the end."""
    cluster = Cluster(NODES, Timeouts())
    cluster.verbose = False
    for command in ("start", "quiesce all", "seal all"):
        cluster.do(command)
    node = 9
    for _ in range(rounds):
        for kind in kinds:
            node += 1
            for command in EVENTS[kind]:
                cluster.do(command.format(node=node, last=cluster.home[5]))
            for command in ("step all",) * 4 + ("quiesce all",):
                cluster.do(command)
    assert cluster.seated == list(range(len(NODES))) and not cluster.ends
    return len(cluster.decided), [len(pickle.dumps(one)) for one in cluster.alive.values()]


@pytest.mark.parametrize("kinds", [*((kind,) for kind in EVENTS), tuple(EVENTS)], ids="-".join)
def test_what_an_agent_keeps_does_not_grow_with_the_views(kinds: tuple[str, ...]) -> None:
    few, sizes = month(kinds, 10)
    many, later_sizes = month(kinds, 40)
    assert many - few == 30 * sum(VIEWS[kind] for kind in kinds)
    for size, later in zip(sizes, later_sizes, strict=True):
        assert later <= size + 100  # the digits of its numbers
