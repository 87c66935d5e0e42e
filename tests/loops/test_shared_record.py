"""Calls of a script that a loss has met at different places: all come to the same one."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops import shared_record
from elaswave_plugin.loops.shared_record import SharedRecord

OWN = ("look",)


class Workers:
    """Workers that meet by threads, in place of processes."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leveled = [0] * count
        self.records = [
            SharedRecord(own=OWN, when_level=lambda rank=rank: self._level(rank))
            for rank in range(count)
        ]
        self._here, self._met = threading.local(), threading.Barrier(count, timeout=20)
        self._values: list[Any] = [None] * count
        monkeypatch.setattr(shared_record, "gathered", self._gathered)
        monkeypatch.setattr(shared_record, "told_by", lambda rank, mine: self._gathered(mine)[rank])
        monkeypatch.setattr(shared_record.dist, "get_rank", lambda: self._here.rank)

    def _level(self, rank: int) -> None:
        self.leveled[rank] += 1

    def _gathered(self, mine: Any) -> list[Any]:
        self._values[self._here.rank] = mine
        self._met.wait()
        values = [*self._values]
        self._met.wait()
        return values

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what each has by ``work(rank)``."""
        results: list[Any] = [None] * len(self.records)

        def run(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = work(rank)
            except ConfigurationError as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    def catch_up(self) -> list[Any]:
        """Have all at the same call; returns who stands where, for those who were behind."""
        return self.together(lambda rank: self.records[rank].catch_up(f"of {rank}"))

    def met_in(self, call: str, *then: tuple[str, Callable[[], Any]]) -> list[Any]:
        """Have a loss meet worker 1 in a call, which gives "own"; what that and others return."""

        def act(rank: int) -> Any:
            record = self.records[rank]

            def interrupted() -> str:
                record.catch_up(None)
                return "own"

            if rank == 0:
                return record.catch_up(None)
            return [record.of(call, interrupted), *(record.of(*one) for one in then)]

        results: list[Any] = self.together(act)[1]
        return results


def made(value: Any) -> Callable[[], Any]:
    return lambda: value


def refuses() -> Any:
    pytest.fail("made")


def calls(record: SharedRecord, names: Sequence[str], first: int = 0) -> list[Any]:
    return [record.of(name, made(first + number)) for number, name in enumerate(names)]


def test_who_is_behind_is_given_what_the_one_ahead_had(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(3, monkeypatch)
    ahead, behind, level = workers.records
    calls(ahead, ["batch", "look", "sum", "sum"])
    calls(behind, ["batch", "look"])
    calls(level, ["batch", "sum", "sum"])
    assert workers.catch_up() == [None, "of 0", None]
    assert behind.is_behind and not ahead.is_behind
    assert [behind.of("sum", refuses) for _ in range(2)] == [2, 3]
    assert workers.leveled == [0, 1, 0] and not behind.is_behind
    assert workers.catch_up() == [None] * 3


def test_a_call_that_a_loss_has_met_is_answered_where_another_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is interrupted in the middle, and its own result counts for nothing."""
    workers = Workers(2, monkeypatch)
    calls(workers.records[0], ["sum", "sum"])
    assert workers.met_in("sum", ("sum", refuses)) == [0, 1]


def test_the_end_of_the_data_is_met_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2, monkeypatch)
    with pytest.raises(StopIteration):
        workers.records[0].of("batch", lambda: next(iter(())))
    workers.catch_up()
    with pytest.raises(StopIteration):
        workers.records[1].of("batch", refuses)
    assert not workers.records[1].is_behind


def test_own_calls_may_be_others_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(3, monkeypatch)
    main, other, same = workers.records
    calls(main, ["sum", "look", "look", "sum", "look"])
    calls(other, ["sum"])
    calls(same, ["sum", "look"], first=10)
    workers.catch_up()
    # One that looks nowhere, and one that has looked once of twice.
    assert other.of("sum", refuses) == 3
    assert [same.of("look", refuses), same.of("sum", refuses)] == [2, 3]
    # What the main process has looked at since is nobody's, and the next call is made by all.
    assert [one.of("sum", made(7)) for one in workers.records] == [7, 7, 7]
    assert not any(one.is_behind for one in workers.records)


def test_one_that_looks_more_does_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2, monkeypatch)
    calls(workers.records[0], ["sum", "sum"])
    workers.catch_up()
    behind = workers.records[1]
    assert behind.of("look", made("own")) == "own" and behind.is_behind
    assert [behind.of("sum", refuses) for _ in range(2)] == [0, 1]


def test_thousands_of_own_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that meets nobody until its end, in which a loss finds all elsewhere."""
    workers = Workers(2, monkeypatch)
    ahead, behind = workers.records
    calls(ahead, ["batch", *["look"] * 3000, "sum"])
    calls(behind, ["batch", *["look"] * 40])
    workers.catch_up()
    looked = [behind.of("look", refuses) for _ in range(2960)]
    assert looked == [*range(41, 3001)]
    assert behind.of("sum", refuses) == 3001


def test_another_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2, monkeypatch)
    calls(workers.records[0], ["sum", "save"])
    workers.catch_up()
    with pytest.raises(
        ConfigurationError, match="calls save where that of another one had called sum"
    ):
        workers.records[1].of("save", refuses)


def test_what_is_large_or_not_plain_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is behind keeps what it had; a later worker cannot be told."""
    workers = Workers(2, monkeypatch)
    workers.records[0].of("gather", made(torch.zeros(1 << 19)))
    workers.records[0].of("objects", made(object()))
    workers.records[0].of("sum", made(3))
    given = workers.met_in("gather", ("objects", made("mine")), ("sum", refuses))
    assert given == ["own", "mine", 3]
    told = workers.records[0].told()
    assert isinstance(told, str) and "gather has returned 2097152 bytes" in told


@pytest.mark.parametrize("seed", range(40))
def test_random_losses_leave_all_with_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script makes the same calls; a loss finds each in another one, and one comes later."""
    draw = random.Random(seed)
    program = [draw.choice(["batch", "sum", "look"]) for _ in range(draw.randrange(5, 1400))]
    workers, seen = Workers(3, monkeypatch), [[], [], []]
    at = [0, 0, 0]

    def go(rank: int, stop: int) -> None:
        while at[rank] < stop:
            name = program[at[rank]]
            value = [rank] if name == "look" else at[rank]
            seen[rank].append(workers.records[rank].of(name, made(value)))
            at[rank] += 1

    for _ in range(4):
        furthest = min(len(program), max(at) + draw.randrange(700))
        for rank in range(3):
            # Own calls apart, nobody is more than a call ahead of another.
            go(rank, furthest if draw.random() < 0.5 else max(at[rank], furthest - 1))
        if draw.random() < 0.5:
            told = workers.records[0].told()
            assert isinstance(told, list)
            workers.records[2] = SharedRecord(own=OWN, when_level=lambda: None)
            workers.records[2].learn(told)
            seen[2], at[2] = [], 0
        workers.catch_up()
        go(2, at[0])
    for rank in range(3):
        go(rank, len(program))
        assert not workers.records[rank].is_behind
    met = [[value for value in one if not isinstance(value, list)] for one in seen]
    assert met[0] == met[1] == met[2]
