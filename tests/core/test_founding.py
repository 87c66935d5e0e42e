"""Nodes that are started with the same line found one job, join it, or learn how it ended."""

import heapq
import random
import statistics

import pytest

from elaswave_plugin.core.agreement import founding
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


class Lives:
    """A folder in true time: lines that look, and an agent of each life that renews its lease.

    Clocks run apart, the file system is slow at times, and processes stand still at times.
    """

    def __init__(self, seed: int, *, counts_from_the_end: bool = False) -> None:
        self._draw = random.Random(seed)
        self._counts_from_the_end = counts_from_the_end
        self._folder = Folder(least=1, most=1, last_call_s=0.0)
        self._rates = {name: self._draw.uniform(1 - DRIFT, 1 + DRIFT) for name in "abcd"}
        # What happens next, in true time: a node looks, or writes that a life of it is renewed,
        # which it has begun to do before.
        self._due = [(self._draw.random(), name, 0, 0.0) for name in self._rates]
        self.trains: dict[int, float] = {}  # until when, by true time

    def run(self, until_s: float) -> None:
        """Let time pass; raises AssertionError where two lives train at the same time."""
        for name, rate in self._rates.items():
            self._folder.start(name, rate)
        heapq.heapify(self._due)
        while self._due[0][0] < until_s:
            self._folder.now_s, name, life, began_s = heapq.heappop(self._due)
            self._write(name, life, began_s) if life else self._look(name)

    def _look(self, name: str) -> None:
        decision = self._folder.look(name)
        if isinstance(decision, Start):
            self._begin_to_renew(name, decision.life)
        else:
            self._look_later(name)

    def _look_later(self, name: str) -> None:
        due_s = self._folder.now_s + 1.0 + self._hesitation_s()
        heapq.heappush(self._due, (due_s, name, 0, 0.0))

    def _begin_to_renew(self, name: str, life: int, *, after_s: float = 0.0) -> None:
        began_s = self._folder.now_s + after_s + self._hesitation_s()
        heapq.heappush(self._due, (began_s + self._hesitation_s(), name, life, began_s))

    def _write(self, name: str, life: int, began_s: float) -> None:
        now_s = self._folder.now_s
        new = renewed(self._folder.record, life, (f"{name}:9",))
        if new is None:
            return self._look_later(name)
        self._folder.record = new
        for other, until_s in self.trains.items():
            assert other == life or until_s < now_s, f"{other} and {life} train at {now_s}"
        known_s = now_s + self._hesitation_s()
        counted_s = known_s if self._counts_from_the_end else began_s
        self.trains[life] = counted_s + LEASE_S * (1 - DRIFT) / self._rates[name]
        self._begin_to_renew(name, life, after_s=2.0)

    def _hesitation_s(self) -> float:
        return self._draw.choice([0.0, 0.01, 0.1, 1.0, self._draw.uniform(0.0, 15.0)])


SEEDS = 150


def test_no_two_lives_train_at_the_same_time() -> None:
    """A lease is over before the next life begins, whoever is slow or stands still."""
    counts = []
    for seed in range(SEEDS):
        lives = Lives(seed)
        lives.run(600.0)
        counts.append(len(lives.trains))
    assert statistics.median(counts) > 3


@pytest.mark.parametrize(
    ("over_s", "from_the_end"),
    [(0.9 * LEASE_S, False), (OVER_S, True)],
    ids=["the next life begins early", "a lease is counted from when it is known"],
)
def test_two_lives_that_train_at_the_same_time_are_seen(
    monkeypatch: pytest.MonkeyPatch, over_s: float, from_the_end: bool
) -> None:
    monkeypatch.setattr(founding, "OVER_S", over_s)
    with pytest.raises(AssertionError, match="train at"):  # noqa: PT012
        for seed in range(SEEDS):
            Lives(seed, counts_from_the_end=from_the_end).run(600.0)
