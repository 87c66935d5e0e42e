"""The promises that a new leader is given, and the view that it builds on."""

from elaswave_plugin.core.agreement.candidate import outcome_of
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import Ballot, Prepare, Promise, Send, Welcome
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId, first_view

NODES = (0, 1, 2)


def views(count: int) -> tuple[MembershipView, ...]:
    """The first one, and others with the same members."""
    start = first_view(NODES)
    more = (
        MembershipView(epoch=epoch, ranks=(0, 1, 2), incarnations=(0,) * 3, nodes=NODES, reason="")
        for epoch in range(1, count)
    )
    return (start, *more)


def promised(known: int) -> Promise:
    """Return the answer of a member that knows 100 views to one that knows fewer."""
    welcome = Welcome(
        ballot=Ballot(term=9, leader=0, epoch=99),
        workers=(WorkerId(slot=2, incarnation=1),),
        nodes=NODES,
        addresses={},
        history=views(100),
        accepted=None,
        lost={},
        empty={},
        incarnations={},
        unused_node=3,
    )
    member = Agreement.of_newcomer(welcome, 2, timeouts=Timeouts(), life=1)
    member.lost(0, "its connection closed")
    member.settle(0.0)
    ballot = Ballot(term=100, leader=1, epoch=100)
    member.receive(1, Prepare(ballot=ballot, epoch=known, lost=(0,)), 0.0)
    (promise,) = (
        effect.message
        for effect in member.settle(0.0)
        if isinstance(effect, Send) and isinstance(effect.message, Promise)
    )
    return promise


def test_a_promise_tells_only_what_who_asks_does_not_know() -> None:
    """Else a leader of a thousand workers reads each view of the job from each of them."""
    assert promised(99).newer == ()
    assert [view.epoch for view in promised(96).newer] == [97, 98, 99]


def test_a_new_leader_adopts_the_views_that_it_has_missed() -> None:
    promises = [promised(99), promised(97), promised(98)]
    found = outcome_of(
        promises, applied_epoch=97, asked_epoch=0, accepted=None, committed=views(98)[-1]
    )
    assert [view.epoch for view in found.missed] == [98, 99]
