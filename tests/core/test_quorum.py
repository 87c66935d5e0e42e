"""Majorities of nodes: any two of them have a node in common."""

from itertools import combinations

import pytest

from elaswave_plugin.core.agreement.quorum import Nodes
from elaswave_plugin.core.agreement.view import MembershipView


def majorities(nodes: tuple[int, ...]) -> list[set[int]]:
    """Every set of these nodes that counts as one, two workers on each node."""
    of_slots = tuple(node for node in nodes for _ in range(2))
    known = Nodes(of_slots)
    slots = tuple(range(len(of_slots)))
    alive = (0,) * len(slots)
    view = MembershipView(epoch=1, ranks=slots, incarnations=alive, nodes=of_slots, reason="test")
    sets = [set(some) for count in range(len(nodes) + 1) for some in combinations(nodes, count)]
    return [one for one in sets if known.minority_in(one, [view]) is None]


@pytest.mark.parametrize("nodes", [(0,), (0, 1), (2, 1), (0, 1, 2), (3, 0, 5, 1), (4, 3, 2, 1, 0)])
def test_any_two_majorities_have_a_node_in_common(nodes: tuple[int, ...]) -> None:
    found = majorities(nodes)
    assert all(one & other for one, other in combinations(found, 2))
    # As many as there can be: of a set and the rest of the nodes exactly one is a majority.
    assert len(found) == 2 ** (len(nodes) - 1)
    half = len(nodes) / 2
    assert all(len(one) > half or min(nodes) in one for one in found)
