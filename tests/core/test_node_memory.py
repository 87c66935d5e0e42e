"""A node's memory stays small, and still tells each of its supervisors all that it lacks."""

import json
from dataclasses import replace

from elaswave_plugin.core.agreement.acceptor_state import NodeMemory
from elaswave_plugin.core.agreement.messages import Ballot, Prepare, Proposal
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import first_view
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.errors import EXIT_LEFT_OUT
from elaswave_plugin.testing import Cluster

NODES = (0, 1, 1, 2, 2, 3)


def job() -> Cluster:
    cluster = Cluster(NODES, Timeouts())
    for command in ("start", "quiesce all", "seal all"):
        cluster.do(command)
    return cluster


def test_what_a_node_remembers_does_not_grow_with_the_views() -> None:
    cluster = job()
    sizes = []
    for number in range(40):
        cluster.do("replan 0")
        for _ in range(4):
            cluster.do("step all")
        assert len(cluster.commits[2]) == number + 2
        sizes.append(len(json.dumps(cluster.memories[1], default=to_json)))
    assert max(sizes[10:]) <= sizes[3] + 20  # the digits of its numbers


def test_who_was_told_of_a_view_last_learns_it_from_its_node() -> None:
    """The other one of its node has accepted the next proposal already; both that know are lost."""
    cluster = job()
    cluster.do("exit 4 SIGKILL")
    cluster.unread.add((0, 2))  # on its way for long
    cluster.do("quiesce all")
    cluster.do("exit 3 SIGKILL")
    accepted = cluster.memories[1].accepted
    assert [len(cluster.commits[slot]) for slot in (0, 1, 2)] == [2, 2, 1]
    assert accepted is not None and accepted.view.epoch > cluster.commits[1][-1].epoch
    cluster.do("kill 0,1")
    for _ in range(2):
        cluster.do("quiesce all")
    assert not cluster.ends
    told = [view.epoch for view in cluster.commits[2]]
    assert told == sorted(cluster.decided) and told[-1] > accepted.view.epoch
    assert cluster.commits[2][-1].ranks == (2, 5)


def test_who_was_left_out_of_the_views_of_its_node_ends() -> None:
    cluster = job()
    agreement = cluster.alive[3]
    view = first_view(NODES)
    later = replace(view, epoch=7)
    proposal = Proposal(ballot=Ballot(term=0, leader=0, epoch=9), view=replace(view, epoch=9))
    memory = NodeMemory().accepting(proposal, (*agreement.history, later), known_epoch=7)
    assert memory.before == (later,)
    cluster.memories[2] = memory
    for gone in (0, 1):
        agreement.lost(gone, "its connection closed")
    prepare = Prepare(ballot=Ballot(term=10, leader=2, epoch=10), epoch=1, lost=(0, 1))
    cluster.vote(3, type(agreement).receive, 2, prepare)
    cluster.settle(3)
    assert cluster.ends[3].exit_code == EXIT_LEFT_OUT
    assert "gone on without this worker" in cluster.ends[3].reason
