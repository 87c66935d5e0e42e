"""Passes are timed by the clock, on a GPU by events that are read once they have happened."""

import time

import pytest
import torch

from elaswave_plugin.core.layer_times import BACKWARD, FORWARD, LAYER, PassTimes
from elaswave_plugin.runtime.stopwatch import Stopwatch


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
    first = watch.mark()
    time.sleep(0.01)
    watch.lap(LAYER, FORWARD, first, count=2, tokens=10)
    watch.times.note(LAYER, BACKWARD, 2.0)
    watch.step_over()
    forward_s, backward_s = watch.times.medians()[LAYER]
    assert 0.005 <= forward_s < 0.1 and backward_s == 2.0
    assert watch.times.pace == forward_s / 10


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
