"""A step is told as of the moment before the look whether its worker may act, or not at all."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_plugin.adapters.recording import Recording
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.framework import StepReport

STOPPED_S = 0.05
REPORT = StepReport(loss=2.0, grad_norm=1.0, lr=0.1, tokens=64)


class Lines:
    """Keeps what is emitted."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.kept.append(fields)


class Stopped:
    """A member whose process is stopped while it looks; ``ends``: and given up meanwhile."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends
        self.awake_s = 0.0

    def await_lease(self) -> None:
        time.sleep(STOPPED_S)
        self.awake_s = time.time()
        if self._ends:
            raise EpochChanged(2, "it was given up")


def recording(member: Stopped) -> tuple[Recording, Lines]:
    """The recording of worker 2, and the lines that it has written."""
    lines = Lines()
    worker = SimpleNamespace(
        slot=2,
        view=SimpleNamespace(epoch=1, ranks=(0, 1, 2)),
        ranks=(0, 1, 2),
        detached=False,
        member=member,
        steps=lines,
        config=SimpleNamespace(dump_state="off"),
    )
    tracker = SimpleNamespace(step=lambda step, metrics: None)
    return Recording(cast(Any, worker), cast(Any, tracker), pieces=lambda: ()), lines


def test_the_time_of_a_step_is_that_of_its_completion() -> None:
    member = Stopped(ends=False)
    record, lines = recording(member)
    record.step(5, REPORT, 0.02, num_microbatches=4, last=False)
    assert [(one["step"], one["epoch"]) for one in lines.kept] == [(5, 1)]
    assert lines.kept[0]["time_s"] <= member.awake_s - STOPPED_S / 2


def test_a_worker_that_was_given_up_writes_no_step() -> None:
    record, lines = recording(Stopped(ends=True))
    with pytest.raises(EpochChanged):
        record.step(5, REPORT, 0.02, num_microbatches=4, last=False)
    assert not lines.kept
