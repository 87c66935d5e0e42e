"""Nodes that list their names: two jobs never live at the same time, and all come to one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from elaswave_plugin.core.agreement.founding import OVER_S, End, Join, LastCall, Start, Wait
from elaswave_plugin.core.agreement.named import (
    Call,
    Ended,
    Known,
    LostLifeError,
    Name,
    NamedFounder,
    Own,
    Renewal,
    digest,
    renews,
)
from tests.explore.naming import Naming, explore_names, walk

PROGRAM = {"script": "train.py"}
WALKS = 100


def test_all_orders_without_a_fault() -> None:
    found = explore_names(faults=0, share=10)
    assert found.is_complete
    assert found.states > 5000


def test_random_orders_with_many_faults() -> None:
    lives = [walk(seed) for seed in range(WALKS)]
    assert min(lives) >= 1
    assert sum(count > 1 for count in lives) >= WALKS / 10


def _silence_is_an_answer() -> Any:
    whole = NamedFounder.decide

    def hasty(
        self: NamedFounder, answers: Mapping[str, Known | None], *rest: Any, **more: Any
    ) -> Any:
        return whole(self, {**dict.fromkeys(self._names), **answers}, *rest, **more)

    return mock.patch.object(NamedFounder, "decide", hasty)


def _the_chosen_do_not_look() -> Any:
    """They go where an offer says, whatever the other names answer."""
    whole = NamedFounder.decide

    def trusting(
        self: NamedFounder, answers: Mapping[str, Known | None], *rest: Any, **more: Any
    ) -> Any:
        offers = (one.offer for one in answers.values() if one is not None)
        for offer in filter(None, offers):
            if isinstance(decision := self._follow(offer), Start):
                return decision
        return whole(self, answers, *rest, **more)

    return mock.patch.object(NamedFounder, "decide", trusting)


def _names_do_not_tell_their_job() -> Any:
    whole = Name.hear

    def silent(self: Name, question: Any, now_s: float) -> Any:
        known = whole(self, question, now_s)
        return replace(known, life=0) if known.offer is None else known

    return mock.patch.object(Name, "hear", silent)


LOOK = ("ask {0}", "ask {0}", "decide {0}")


def looks(*names: str) -> tuple[str, ...]:
    """Return the moves by which each of these looks once."""
    return tuple(move.format(name) for name in names for move in LOOK)


# The first look of each founds nothing: it has to have lived for a while.
# a cannot reach the others, which run a job: one more founds beside it.
CUT_OFF = (
    *("start b", "start c", *looks("b", "c"), *looks("b", "c"), "meet 1"),
    *("start a", *looks("a"), "leave_out c", "sunder a b", "sunder b c"),
    *(*looks("c", "a"), *looks("c"), "meet 2"),
)
# b and c run a job, of which nobody has told; b is left out of it, and a comes.
LEFT_OUT = (
    *("start b", "start c", *looks("b", "c"), *looks("b", "c"), "meet 1"),
    *("start a", *looks("a"), "leave_out b", *looks("b", "a"), *looks("b"), "meet 2"),
)
# a and b found at the same time, both with c, which meets b; then b is cut off, and c left out.
TWO_FOUNDERS = (
    *("start b", "start c", *looks("b", "c"), "ask b", "ask b", "start a", *looks("a")),
    *("ask a", "ask a", "age b", *looks("c"), "ask c", "decide b", "ask c", "decide a"),
    *("decide c", "meet 1", "sunder b c", "leave_out c", *looks("c"), "meet 2"),
)


@pytest.mark.parametrize(
    ("sabotage", "moves"),
    [
        (_silence_is_an_answer, CUT_OFF),
        (_the_chosen_do_not_look, TWO_FOUNDERS),
        (_names_do_not_tell_their_job, LEFT_OUT),
    ],
    ids=["silence", "own look", "own job"],
)
def test_a_rule_that_is_taken_away_is_seen(
    sabotage: Callable[[], Any], moves: tuple[str, ...]
) -> None:
    """With it the last move cannot be made; without it a second job begins beside the first."""
    naming = Naming()
    for move in moves[:-1]:
        naming.make(move)
    assert moves[-1] not in naming.usual()
    naming = Naming()
    with sabotage():
        for move in moves[:-1]:
            naming.make(move)
        assert moves[-1] in naming.usual()
        with pytest.raises(AssertionError, match="begins, and"):
            naming.make(moves[-1])


def founder(who: str, name: str, *, names: tuple[str, ...] = ("a", "b")) -> NamedFounder:
    call = LastCall(2, 2, last_call_s=0.0, fits=lambda nodes: True)
    return NamedFounder(who, name, names, call, draw_life=lambda: 7)


def decide(one: NamedFounder, now_s: float, **answers: Known | None) -> object:
    return one.decide(answers, now_s, address="a:1", scripts_port=2)


def test_the_first_name_founds_once_leases_of_before_have_run_out() -> None:
    first, second = founder("one", "a"), founder("two", "b")
    waits = Known(program=PROGRAM, waiting=("two",))
    assert isinstance(decide(first, 0.0, a=waits, b=Known()), Wait)
    assert decide(first, OVER_S + 1.0, a=waits, b=Known()) == Start(7, 0, 2, "a:1", 2)
    assert isinstance(decide(second, OVER_S + 1.0, a=Known(), b=Known()), Wait)
    offered = Known(life=7, offer=first.offer)
    assert decide(second, 0.0, a=offered, b=Known()) == Start(7, 1, 2, "a:1", 2)
    # Once: where they have not met, it waits for another life.
    assert isinstance(decide(second, 1.0, a=offered, b=Known()), Wait)


def test_a_silent_name_is_named_and_one_where_nobody_is_does_not_matter() -> None:
    one = founder("one", "a", names=("a", "b", "c"))
    waits = Known(waiting=("two",))
    told = decide(one, 0.0, a=waits, b=Known())
    assert isinstance(told, Wait)
    assert told.why == "c to answer, where the job may be known"
    assert isinstance(decide(one, OVER_S + 1.0, a=waits, b=Known(), c=None), Start)


def test_a_name_that_has_forgotten_hears_of_its_job_and_for_how_long() -> None:
    name = Name(PROGRAM)
    known = name.hear(Renewal(life=3, contacts=("h:1",)), 0.0)
    assert (known.life, known.job, known.contacts) == (0, 3, ("h:1",))
    assert decide(founder("one", "a"), 0.0, a=known) == Join(3, ("h:1",))
    call = Call(who="two", program=digest(PROGRAM))
    assert name.hear(call, 5.0).contacts == ("h:1",)
    assert name.hear(call, 5.1).contacts == ()
    # Part of another job, it hears nothing of this one.
    name.hear(Own(life=4), 6.0)
    assert name.hear(Renewal(life=3, contacts=("h:1",)), 7.0).contacts == ()


def test_those_that_run_another_program_are_not_counted() -> None:
    name = Name(PROGRAM)
    name.hear(Call(who="two", program=digest({"script": "other.py"})), 0.0)
    name.hear(Call(who="three", program=digest(PROGRAM)), 0.0)
    assert name.hear(Own(), 1.0).waiting == ("three",)


@pytest.mark.parametrize(("code", "ends"), [(0, True), (1, True), (75, False)])
def test_the_end_is_told_unless_it_asks_for_another_life(code: int, ends: bool) -> None:
    name = Name(PROGRAM)
    name.hear(Own(life=3), 0.0)
    known = name.hear(Ended(life=3, exit_code=code), 0.0)
    told = decide(founder("one", "b"), 0.0, a=known, b=Known())
    assert told == End(code) if ends else isinstance(told, Wait)


def test_a_lease_is_renewed_by_enough_names() -> None:
    part, other, blank = Known(life=3), Known(life=4), Known()
    assert renews([part, part, blank], 3, 2)
    assert not renews([part, blank, None], 3, 2)
    with pytest.raises(LostLifeError):
        renews([part, other, other], 3, 2)
