"""Nodes that are started with the same line found one job, join it, or learn how it ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.agreement.founding import (
    ENDED,
    GONE_S,
    LEASE_S,
    MEETS,
    OVER_S,
    RUNS,
    STARTS,
    Decision,
    End,
    Founder,
    JobRecord,
    Join,
    LastCall,
    Start,
    Wait,
    ended,
    renewed,
)
from elaswave_plugin.core.agreement.lease import DRIFT

LAST_CALL_S = 3.0


class Folder:
    """The record, and the nodes that look at it, each by a clock of its own."""

    def __init__(
        self,
        *,
        least: int = 2,
        most: int = 4,
        fits: tuple[int, ...] = (),
        last_call_s: float = LAST_CALL_S,
    ) -> None:
        self.record = JobRecord()
        self.now_s = 0.0
        self._least, self._most, self._fits = least, most, fits
        self._last_call_s = last_call_s
        self.nodes: dict[str, Founder] = {}
        self.rates: dict[str, float] = {}

    def start(self, name: str, rate: float = 1.0) -> None:
        """A node is started."""
        self.rates[name] = rate
        self.nodes[name] = Founder(
            name,
            program={"script": "train.py"},
            last_call=LastCall(
                self._least,
                self._most,
                last_call_s=self._last_call_s,
                fits=lambda nodes: nodes in self._fits if self._fits else True,
            ),
        )

    def look(self, name: str) -> Decision:
        """It looks."""
        now_s = self.now_s * self.rates[name]
        self.record, decision = self.nodes[name].look(
            self.record, now_s, address=f"{name}:1", scripts_port=2
        )
        self.nodes[name].decided(decision)
        return decision

    def pass_time(self, seconds: float, *looking: str) -> list[Decision]:
        """Have these look each second; returns what was decided last."""
        last: list[Decision] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            last = [self.look(name) for name in looking]
        return last


def test_all_are_there_and_it_starts_at_once() -> None:
    folder = Folder(least=3, most=3)
    for name in "abc":
        folder.start(name)
    assert isinstance(folder.look("a"), Wait)
    assert isinstance(folder.look("b"), Wait)
    assert isinstance(folder.look("c"), Wait)  # the founder has not seen it yet
    assert folder.look("a") == Start(1, 0, 3, "a:1", 2)
    assert folder.look("c") == Start(1, 2, 3, "a:1", 2)
    assert folder.look("b") == Start(1, 1, 3, "a:1", 2)


def test_with_the_least_it_waits_for_the_last_call() -> None:
    folder = Folder(least=2, most=4)
    for name in "ab":
        folder.start(name)
        folder.look(name)
    (decision,) = folder.pass_time(1, "a")
    assert isinstance(decision, Wait)
    decision, _ = folder.pass_time(LAST_CALL_S, "a", "b")
    assert decision == Start(1, 0, 2, "a:1", 2)


def test_one_that_looks_no_more_is_not_chosen() -> None:
    folder = Folder(least=2, most=4, last_call_s=20.0)
    for name in "abc":
        folder.start(name)
        folder.look(name)
    folder.pass_time(GONE_S - 1, "a", "c")
    assert "b" in folder.record.waiting
    folder.pass_time(20, "a", "c")
    assert folder.record.chosen == ("a", "c")


def test_the_largest_number_that_fits_is_chosen() -> None:
    folder = Folder(least=1, most=4, fits=(1, 2, 4))
    for name in "abc":
        folder.start(name)
        folder.look(name)
    last = folder.pass_time(LAST_CALL_S + 1, "a", "b", "c")
    assert folder.record.chosen == ("a", "b")
    assert isinstance(last[2], Wait)
    new = renewed(folder.record, 1, ("a:9",))
    assert new is not None
    folder.record = new
    assert folder.look("c") == Join(1, ("a:9",))


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_end_is_told_to_those_that_come_later(code: int) -> None:
    folder = running_folder()
    over = ended(folder.record, 1, code)
    assert over is not None
    folder.record = over
    folder.start("z")
    assert folder.look("z") == End(code)


@pytest.mark.parametrize("code", [75, 143])
def test_after_an_end_that_asks_for_it_the_next_life_begins(code: int) -> None:
    """Not at once: some of its workers may still be ending."""
    folder = running_folder()
    over = ended(folder.record, 1, code)
    assert over is not None
    folder.record = over
    folder.start("z")
    assert isinstance(folder.look("z"), Wait)
    folder.pass_time(OVER_S, "z")
    assert folder.record.state == ENDED
    folder.pass_time(2, "z")
    assert (folder.record.life, folder.record.state, folder.record.founder) == (2, MEETS, "z")


def test_a_life_that_renews_nothing_is_over_once_its_lease_has_run_out() -> None:
    folder = running_folder()
    folder.start("z")
    assert folder.look("z") == Join(1, ("a:9",))
    (decision,) = folder.pass_time(OVER_S, "z")
    assert decision == Join(1, ("a:9",))
    (decision,) = folder.pass_time(2, "z")
    assert isinstance(decision, Wait)
    assert folder.record.life == 2
    # The old one is told, if it lives after all.
    assert renewed(folder.record, 1, ("a:9",)) is None
    assert ended(folder.record, 1, 0) is None


def test_the_next_founder_goes_on_where_the_first_dies() -> None:
    folder = Folder(least=2, most=2)
    for name in "ab":
        folder.start(name)
    folder.look("a")
    folder.look("b")
    folder.pass_time(GONE_S + 2, "b")
    assert folder.record.founder == "b"
    folder.start("c")
    folder.look("c")
    assert isinstance(folder.look("b"), Start)
    assert folder.record.chosen == ("b", "c")


def test_a_start_that_fails_is_tried_again_with_those_that_are_there() -> None:
    folder = Folder(least=2, most=2)
    for name in "ab":
        folder.start(name)
        folder.look(name)
    assert isinstance(folder.look("a"), Start)
    assert folder.record.state == STARTS
    folder.record = folder.nodes["a"].start_failed(folder.record, 1)
    assert (folder.record.state, folder.record.life) == (MEETS, 2)
    # One that hears of the failure later changes nothing.
    assert folder.nodes["b"].start_failed(folder.record, 1) == folder.record
    folder.look("b")
    assert folder.look("a") == Start(2, 0, 2, "a:1", 2)
    assert folder.look("b") == Start(2, 1, 2, "a:1", 2)


def running_folder() -> Folder:
    """A job of two nodes that runs in its first life."""
    folder = Folder(least=2, most=2)
    for name in "ab":
        folder.start(name)
        folder.look(name)
    assert isinstance(folder.look("a"), Start)
    new = renewed(folder.record, 1, ("a:9",))
    assert new is not None
    folder.record = new
    assert folder.record.state == RUNS
    return folder


SPAN = st.floats(0.0, 2.0)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["look", "renew", "start", "die"]), st.integers(0, 3), SPAN),
    max_size=120,
)
RATES = st.lists(st.floats(1 - DRIFT, 1 + DRIFT), min_size=4, max_size=4)


@given(events=EVENTS, rates=RATES)
def test_no_two_lives_train_at_the_same_time(
    events: list[tuple[str, int, float]], rates: list[float]
) -> None:
    """A lease is over before the next life begins, whoever is slow, stopped or dead."""
    folder = Folder(least=1, most=2)
    lives: dict[int, float] = {}  # until when each life trains, by true time
    for what, number, seconds in events:
        folder.now_s += seconds * (4.0 if what == "die" else 1.0)
        name = f"node{number}"
        if what == "start" or name not in folder.nodes:
            folder.start(name, rates[number])
            continue
        if what == "die":
            continue  # it does nothing for some time
        if what == "look":
            before = folder.record
            folder.look(name)
            assert folder.record.life in (before.life, before.life + 1)
            continue
        # The agents of every life that there was try to renew its lease.
        began_s = folder.now_s
        folder.now_s += seconds  # the file system is slow
        for life in range(1, folder.record.life + 1):
            new = renewed(folder.record, life, ("a:9",))
            if new is not None:
                folder.record = new
                lives[life] = began_s + LEASE_S * (1 - DRIFT) / rates[number]
        newest = max(lives, default=0)
        for life, until_s in lives.items():
            assert life == newest or until_s < began_s
