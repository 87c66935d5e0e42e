"""DeepSpeed's monitor after a loss: every step once and in order, the same files, the same run."""

import csv
import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import EngineSpec
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.tracking.wandb_files import history, run_ids

LR = "Train/Samples/lr"
OFFLINE = "import os; os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true')"


def settings_of(folder: Path, *kinds: str) -> str:
    """Settings with these monitors, whose files are in ``folder``."""
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return json.dumps(dict.fromkeys(kinds, section))


def places(run: Outcome) -> list[int]:
    """Return the place of each step on the axis of DeepSpeed's monitor: samples so far."""
    return [run.spec.global_batch * (step + 1) for step in range(run.spec.steps)]


def csv_rows(folder: Path) -> list[list[str]]:
    with (folder / "job" / "Train_Samples_lr.csv").open(newline="") as file:
        return [*csv.reader(file)]


def scalars(folder: Path) -> Iterator[list[tuple[int, float]]]:
    """The points of each event file, oldest file first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in sorted((folder / "job").glob("events.*"), key=lambda one: one.stat().st_mtime):
        reader = EventAccumulator(str(path))
        reader.Reload()
        if LR in reader.Tags()["scalars"]:
            yield [(event.step, event.value) for event in reader.Scalars(LR)]


def rate_of(run: Outcome) -> dict[int, float]:
    """The learning rate of each step, as every worker recorded it."""
    return {record["step"]: record["lr"] for record in run.files.steps}


def check_csv(run: Outcome, folder: Path) -> None:
    rows = csv_rows(folder)
    assert rows[0] == ["step", "lr"]
    assert [int(row[0]) for row in rows[1:]] == places(run)
    rates = rate_of(run)
    assert [float(row[1]) for row in rows[1:]] == [rates[step] for step in sorted(rates)]


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("stage", "kills"),
    sampled(
        [
            (1, ("0@3:backward",)),
            (2, ("0@3:gather",)),
            (0, ("0@0:forward",)),
            (3, ("0@3:snapshot",)),
            (1, ("2@3:gather", "0@4:data")),
            (2, ("0@2:optimizer", "3@2:rebind")),
            # One of them is the next owner, which dies while it opens the monitors.
            (1, ("0@2:backward", "3@4:reduce", "1@4:forward")),
        ]
    ),
)
def test_every_step_is_written_once_and_in_order(
    run: Launch, tmp_path: Path, stage: int, kills: tuple[str, ...]
) -> None:
    pytest.importorskip("tensorboard")
    spec = EngineSpec(
        stage=stage, kills=kills, settings=settings_of(tmp_path, "csv_monitor", "tensorboard")
    )
    killed = run(spec)
    check_survived(killed)
    check_csv(killed, tmp_path)
    files = [*scalars(tmp_path)]
    assert 1 <= len(files) <= 1 + len(kills)
    points = [point for file in files for point in file]
    assert [place for place, _ in points] == places(killed)
    wanted = [rate_of(killed)[step] for step in range(spec.steps)]
    assert [value for _, value in points] == pytest.approx(wanted, rel=1e-6)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="0", moment="3:gather")
def test_a_monitor_that_nobody_opens_again_is_seen(run: Launch, tmp_path: Path) -> None:
    """Negative control."""
    monitor = "elaswave_plugin.adapters.deepspeed.engine.monitor"
    spec = EngineSpec(
        kills=("0@3:gather",),
        settings=settings_of(tmp_path, "csv_monitor"),
        sabotage=f"from {monitor} import ElasticMonitor as M; "
        "M._open_where_free = lambda self, held: None",
    )
    killed = run(spec)
    check_survived(killed)
    with pytest.raises(AssertionError):
        check_csv(killed, tmp_path)


@proves(Kind.KILL, Promise.LOGGED, victim="0", moment="4:backward")
def test_the_wandb_run_is_the_same_one(run: Launch, tmp_path: Path) -> None:
    """Rows that W&B's own process had not written when its owner died are missing, none twice."""
    pytest.importorskip("wandb")
    settings: dict[str, Any] = {"wandb": {"enabled": True, "project": "tests"}}
    settings.update(json.loads(settings_of(tmp_path, "csv_monitor")))
    spec = EngineSpec(
        steps=12, kills=("0@4:backward",), settings=json.dumps(settings), sabotage=OFFLINE
    )
    killed = run(spec)
    check_survived(killed)
    check_csv(killed, tmp_path)
    assert len(run_ids(killed.directory)) == 1
    first, second = history(killed.directory).values()
    # Step 3 was the last complete one, which the first owner could not write any more.
    assert [row["_step"] for row in second] == places(killed)[3:]
    assert [row["_step"] for row in first] == places(killed)[: len(first)] and len(first) <= 3
    assert all(row[LR] == rate_of(killed)[row["_step"] // 8 - 1] for row in first + second)


@proves(Kind.HANG, Promise.ENDS_WELL)
def test_monitors_that_hang_hold_no_end_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W&B may wait for its service for as long as it likes."""
    from elaswave_plugin.adapters.deepspeed.engine import monitor

    monkeypatch.setattr(monitor, "_LIMIT_S", 0.05, raising=False)
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 1)
    loop = Mock(dead=False, iteration=1)
    loop.worker.completed = 2
    mine, hangs = monitor.ElasticMonitor(Mock(), loop), Future[Any]()
    mine.write_events([("Train/loss", 1.0, 8)])
    mine._closing = mine._opening = hangs
    for leave in (mine.await_closed, mine.close, lambda: monitor._close(None, hangs)):
        thread = Thread(target=leave, daemon=True)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
    assert [record.getMessage() for record in caplog.records] == [
        "DeepSpeed's monitors are still not closed after 0.05 s",
        "DeepSpeed's monitors are not open after 0.05 s: the last 1 events are lost",
        "DeepSpeed's monitors are still not open after 0.05 s: left",
    ]


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_two_wandb_runs_in_one_process_are_refused(run: Launch) -> None:
    settings = {"wandb": {"enabled": True}, "elaswave": {"wandb": "offline"}}
    refused = run(EngineSpec(settings=json.dumps(settings)))
    assert refused.returncode == 2 and "one W&B run" in refused.output
