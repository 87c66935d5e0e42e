"""The results of calls, told to a worker that comes later."""

from typing import Any

import pytest
import torch

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops import call_record
from elaswave_plugin.loops.call_record import CallRecord


class Script:
    """A script's record, with the draws that it has followed."""

    def __init__(self) -> None:
        self.lags = False
        self.draws: list[int] = []
        self.followed: list[list[int]] = []
        self.record = CallRecord(
            lags=lambda: self.lags, draws=lambda: self.draws, follow_draws=self.followed.append
        )


def told(first: Script) -> list[bytes]:
    record = first.record.told()
    assert isinstance(record, list)
    return record


def test_the_calls_of_the_others_are_passed_over_in_their_order() -> None:
    first, later = Script(), Script()
    for step in range(1200):
        first.draws = [step]
        first.record.of("forward", lambda step=step: [{"loss": torch.tensor(float(step))}])
        assert first.record.of("update", lambda: (True, 0.5, None)) == (True, 0.5, None)
    later.record.learn(told(first))
    for step in range(1200):
        (one,) = later.record.of("forward", lambda: pytest.fail("made"))
        assert one["loss"] == step and later.followed[-1] == [step]
        later.record.pass_over("update")
    assert not later.record.is_behind
    assert later.record.of("forward", lambda: 7) == 7


def test_what_a_script_does_with_a_result_changes_no_record() -> None:
    first, later = Script(), Script()
    first.record.of("forward", lambda: [torch.ones(2)])[0].zero_()
    later.record.learn(told(first))
    assert later.record.pass_over("forward")[0].tolist() == [1, 1]


def test_who_has_passed_over_tells_the_next() -> None:
    first, second, third = Script(), Script(), Script()
    first.record.note("forward", 1)
    second.record.learn(told(first))
    second.record.pass_over("forward")
    second.record.note("update", 2)
    third.record.learn(told(second))
    assert [third.record.pass_over(one) for one in ("forward", "update")] == [1, 2]


def test_what_was_so_at_a_call_is_known_before_it_and_told_on() -> None:
    first, second, third = Script(), Script(), Script()
    for first.draws in ([4], [3]):
        first.record.note("forward", 1)
    for later, earlier in ((second, first), (third, second)):
        later.record.learn(told(earlier))
        for draws in ([4], [3]):
            assert later.record.draws_coming == draws
            later.record.pass_over("forward")
        assert later.record.draws_coming is None


def test_the_end_of_the_data_comes_again() -> None:
    first, later = Script(), Script()
    with pytest.raises(StopIteration):
        first.record.of("forward", lambda: next(iter(())))
    first.record.note("forward", 1)
    later.record.learn(told(first))
    with pytest.raises(StopIteration):
        later.record.of("forward", lambda: pytest.fail("made"))
    assert later.record.pass_over("forward") == 1


def test_a_call_of_the_step_in_which_the_others_stand_is_made() -> None:
    first, later = Script(), Script()
    first.record.note("forward", 1)
    later.record.learn(told(first))
    assert later.record.of("forward", lambda: 2, is_made=True) == 2


@pytest.mark.parametrize("before", [0, 1])
def test_another_call_is_a_sentence(before: int) -> None:
    """Also one more than the others have behind them, before their present step."""
    first, later = Script(), Script()
    for _ in range(before):
        first.record.note("forward", 1)
    later.record.learn(told(first))
    later.lags = True
    for _ in range(before):
        later.record.pass_over("forward")
    with pytest.raises(ConfigurationError, match="its script calls save where those of the others"):
        later.record.of("save", lambda: pytest.fail("made"))


def test_tensors_of_other_sizes_are_a_sentence() -> None:
    mine = [torch.zeros(2) for _ in range(3)]
    for theirs in ([torch.ones(2)] * 3, [torch.ones(2)] * 4, [torch.ones(3)] * 3):
        first, later = Script(), Script()
        first.record.note("allgather", theirs)
        later.record.learn(told(first))
        if len(theirs) == 3 and len(theirs[0]) == 2:
            later.record.fill("allgather", mine)
            assert all(one.tolist() == [1, 1] for one in mine)
        else:
            with pytest.raises(ConfigurationError, match="with tensors of other sizes"):
                later.record.fill("allgather", mine)


@pytest.mark.parametrize("bound", ["LARGEST", "_MOST"])
def test_what_is_large_ends_the_record(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """By itself, or with all that was returned before it."""
    monkeypatch.setattr(call_record, bound, 4 * 3 - 1)
    first = Script()
    for _ in range(3):
        assert isinstance(first.record.told(), list)
        first.record.note("forward", torch.zeros(3 if bound == "LARGEST" else 1))
        if bound == "LARGEST":
            break
    assert str(first.record.told()).endswith("returned 12 bytes, and at most 11 are kept")


class Odd:
    """No plain value."""


@pytest.mark.parametrize("count", [1, 600])
def test_what_is_not_plain_ends_the_record(count: int) -> None:
    first = Script()
    values: list[Any] = [Odd()] * count
    for value in values:
        assert first.record.of("forward", lambda value=value: value) is value
    assert "Odd" in str(first.record.told())
