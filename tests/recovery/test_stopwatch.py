"""Passes are timed by the clock, on a GPU by events that are read once they have happened."""

import time
from types import SimpleNamespace

import pytest
import torch

from elaswave_plugin.core.planner.layer_times import (
    BACKWARD,
    FOLLOWED,
    FORWARD,
    HELD,
    LAYER,
    TAIL,
    PassTimes,
)
from elaswave_plugin.recovery import stopwatch
from elaswave_plugin.recovery.stopwatch import Operations, Stopwatch


class Event:
    """A stand-in for an event of a stream: it has happened once its moment is reached."""

    now_ms = 0.0
    reached_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now_ms += 5
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "reading it now would block"
        return end.at_ms - self.at_ms


def step(watch: Stopwatch) -> None:
    for which in (FORWARD, BACKWARD):
        first = watch.mark()
        watch.lap(LAYER, which, first, count=2)
    watch.step_over()


def test_the_clock_on_a_cpu() -> None:
    watch = Stopwatch(PassTimes(wanted_steps=1))
    begun_s = time.perf_counter()
    first = watch.mark()
    time.sleep(0.01)
    watch.lap(LAYER, FORWARD, first, count=2, tokens=10)
    most_s = time.perf_counter() - begun_s
    watch.times.note(LAYER, BACKWARD, 2.0)
    watch.step_over()
    forward_s, backward_s = watch.times.medians()[LAYER]
    assert 0.01 <= 2 * forward_s <= most_s and backward_s == 2.0
    assert watch.times.pace == forward_s / 10


def test_a_sum_of_gradients_without_the_waiting_in_it() -> None:
    waited = [0.0]
    watch = Stopwatch(PassTimes(), waited=lambda: waited[0])
    assert watch.times.sum_s == 0
    begun_s = time.perf_counter()
    for _ in range(2):
        with watch.summing():
            time.sleep(0.02)
            waited[0] += 0.015
    most_s = time.perf_counter() - begun_s - 0.03
    watch.step_over()
    assert 0.01 <= watch.times.sum_s <= most_s
    with watch.summing():
        time.sleep(0.05)
    watch.drop_step()
    watch.step_over()
    assert watch.times.sum_s <= most_s


@pytest.mark.parametrize("on_gpu", [False, True])
def test_passes_are_told_apart_while_state_follows(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """By the moment at which a pass ends, on a GPU too, where its time is known later."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now_ms, Event.reached_ms = 0.0, 1e9
    follows = False
    watch = Stopwatch(PassTimes(wanted_steps=1), on_gpu=on_gpu, is_followed=lambda: follows)
    step(watch)
    assert FOLLOWED not in watch.times.medians()
    follows = True
    watch.lap(LAYER, FORWARD, watch.mark())
    follows = False
    watch.step_over()
    assert FOLLOWED in watch.times.medians()


def test_events_on_a_gpu_are_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now_ms = Event.reached_ms = 0.0
    watch = Stopwatch(PassTimes(wanted_steps=1), on_gpu=True)
    step(watch)
    assert watch.times.medians() == {}
    Event.reached_ms = Event.now_ms
    step(watch)
    assert watch.times.medians() == {LAYER: [0.0025, 0.0025]}


def test_events_of_an_aborted_stream_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now_ms = Event.reached_ms = 0.0
    watch = Stopwatch(PassTimes(wanted_steps=1), on_gpu=True)
    step(watch)
    watch.drop_step()
    Event.reached_ms = Event.now_ms
    watch.step_over()
    assert watch.times.medians() == {}


def test_what_lies_between_operations_and_is_no_waiting_belongs_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"clock": 0.0, "waited": 0.0}
    clock = SimpleNamespace(perf_counter=lambda: now["clock"])
    monkeypatch.setattr(stopwatch, "time", clock)
    operations = Operations(lambda: now["waited"])

    def pass_by(seconds: float, *, waiting: float = 0.0) -> None:
        now["clock"] += seconds + waiting
        now["waited"] += waiting

    operations.begin_step()
    pass_by(1.0, waiting=4.0)
    for waiting in (0.0, 2.0, 8.0):
        operations.enter()
        # What is waited for within an operation is a part of it.
        pass_by(100.0, waiting=16.0)
        operations.leave()
        pass_by(0.25, waiting=waiting)
    assert operations.seconds() == (0.25, 5.0 + 0.25 + 8.0)
    operations.begin_step()
    assert operations.seconds() is None
    operations.enter()
    operations.leave()
    assert operations.seconds() is None, "one operation has nothing between it and another"


def test_an_operation_whose_end_is_not_seen_counts_for_nothing() -> None:
    operations = Operations(lambda: 0.0)
    for _ in range(3):
        operations.enter()
    assert operations.seconds() is None


def in_its_second_step(*, on_gpu: bool = False) -> Stopwatch:
    watch = Stopwatch(PassTimes(wanted_steps=1), on_gpu=on_gpu)
    watch.times.note(LAYER, FORWARD, 1.0)
    watch.times.step_over()
    return watch


def test_what_is_saved_for_the_backward_pass_is_counted_once() -> None:
    """Also after a pass that was interrupted, which says nothing."""
    watch, model = in_its_second_step(), torch.nn.Linear(4, 4)
    inputs = torch.ones(8, 4)
    watch.begin_holding(model, [LAYER])
    model(inputs).exp()
    watch.drop_step()
    torch.ones(999, requires_grad=True).exp()
    assert watch.times.lacks_held([LAYER])
    for _ in range(2):
        watch.begin_holding(model, [LAYER])
        # The inputs by both layers, each result by what squares it, weights by neither.
        (model(inputs) ** 2 + model(inputs) ** 2).sum().backward()
        watch.holds(LAYER, count=2)
        watch.end_holding()
        inputs = torch.ones(80, 4)
    assert watch.times.medians()[HELD] == [0.0, 3 * inputs[:8].nbytes / 2, 0.0]


def test_on_a_gpu_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([1000, 1600, 1500])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(taken))
    watch = in_its_second_step(on_gpu=True)
    watch.begin_holding(torch.nn.Linear(4, 4), [LAYER, TAIL])
    watch.holds(LAYER, count=3)
    watch.holds(TAIL, count=1)
    watch.end_holding()
    assert watch.times.medians()[HELD] == [0.0, 200.0, 0.0]
