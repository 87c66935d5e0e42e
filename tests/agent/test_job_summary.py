"""The last line about a job says what the views and the files of the job say."""

import json
import time
from pathlib import Path

import pytest

from elaswave_plugin.agent.peers import job_summary as summaries
from elaswave_plugin.agent.peers.job_summary import Changes, job_summary, sums_up
from elaswave_plugin.core.agreement.view import (
    Arrival,
    FailureEvent,
    MembershipView,
    WorkerId,
    first_view,
    grown_view,
    next_view,
)


def history(*changes: FailureEvent | Arrival) -> list[MembershipView]:
    """The views of a job of four on two nodes, one more for each change."""
    views = [first_view((0, 0, 1, 1))]
    for change in changes:
        arrives = isinstance(change, Arrival)
        view = grown_view(views[-1], [change]) if arrives else next_view(views[-1], [change], 1.0)
        assert view is not None
        views.append(view)
    return views


def changes(*those: FailureEvent | Arrival) -> Changes:
    """Return what is counted of them."""
    views = history(*those)
    counted = Changes(views[0])
    for view in views:
        counted.follow(view)
    return counted


def gone(slot: int, kind: str) -> FailureEvent:
    return FailureEvent(kind=kind, slot=slot, detected_at_s=0.0, evidence="seen so")


def test_losses_departures_and_arrivals_are_counted_apart() -> None:
    back = Arrival(worker=WorkerId(slot=1, incarnation=1), node=0)
    counts = changes(gone(1, "exit"), gone(3, "leave"), back, gone(2, "lost"))
    line = job_summary(counts, 40, time.time() - 192.0, None)
    counted = "2 losses survived, 1 departure, 1 arrival"
    assert line == f"the job is done: 40 steps completed, {counted}, 3 min 12 s"
    line = job_summary(changes(), 1, time.time(), None)
    assert line == "the job is done: 1 step completed, no worker lost, 0 s"


def test_the_ledger_is_audited_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": step, "epoch": 1, "samples": [2 * step, 2 * step + 1]} for step in (0, 1, 3)]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    steps = [{"step": step, "epoch": 1} for step in range(4)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    line = job_summary(changes(), 4, time.time(), str(tmp_path))
    assert line.endswith(", 0 s; samples: 2 lost, 0 repeated")
    monkeypatch.setattr(summaries, "_MOST_BYTES", 10)
    line = job_summary(changes(), 4, time.time(), str(tmp_path))
    assert line.endswith(f"; `elaswave report {tmp_path}` counts samples lost or repeated")
    (tmp_path / "ledger.jsonl").unlink()
    assert "; samples lost or repeated are not known: " in job_summary(
        changes(), 4, time.time(), str(tmp_path)
    )


def test_one_agent_says_it() -> None:
    view = history(gone(0, "exit"))[-1]
    assert view.nodes == (0, 1, 1)
    assert [node for node in range(2) if sums_up(node, view, {})] == [0]
    assert [node for node in range(2) if sums_up(node, view, {0: "gone"})] == [1]
    shrunk = history(gone(0, "exit"), gone(1, "exit"))[-1]
    assert [node for node in range(2) if sums_up(node, shrunk, {})] == [1]
