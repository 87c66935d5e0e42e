"""Tracker: only the owner logs, each step once, in order, and it never waits or raises."""

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.tracking import sinks
from elaswave_plugin.tracking.events import EventLog
from elaswave_plugin.tracking.tracker import STATE_FILE, Tracker, numbers_of, step_metrics


class ListSink:
    name = "list"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True

    def last_step(self) -> int | None:
        return None

    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def tracker(sink: ListSink, owner: bool = True, directory: Path | None = None) -> Tracker:
    return Tracker(ElasticConfig(), "run", owner, directory=directory, openers=(lambda: sink,))


def test_tracker_owner_logs_each_step_once_and_in_order(tmp_path: Path) -> None:
    sink = ListSink()
    subject = tracker(sink, directory=tmp_path)
    for step in (0, 1, 2, 2, 1, 3):
        subject.step(step, {"train/loss": step / 4})
    assert subject.close()
    assert sink.rows == [(step, {"train/loss": step / 4}) for step in (0, 1, 2, 3)]
    assert sink.closed
    assert json.loads((tmp_path / STATE_FILE).read_text()) == {"last_step": 3, "open": ""}


def test_tracker_recovery_joins_the_row_of_its_step() -> None:
    sink = ListSink()
    subject = tracker(sink)
    subject.step(0, {"train/loss": 2.0})
    phases = {"detect": 0.001, "move": 0.02}
    subject.event("recovered", 1, {"reason": "x", "mttr_s": 0.25, "phases_s": phases})
    subject.step(1, {"train/loss": 1.0})
    subject.event("checkpoint_saved", 1, {"seconds": 3})
    assert subject.close()
    assert sink.rows == [
        (0, {"train/loss": 2.0}),
        (
            1,
            {
                "recovered/mttr_s": 0.25,
                "recovered/phases_s/detect": 0.001,
                "recovered/phases_s/move": 0.02,
                "train/loss": 1.0,
            },
        ),
        (2, {"checkpoint_saved/seconds": 3.0}),
    ]


def test_tracker_next_owner_continues_after_the_last_logged_step(tmp_path: Path) -> None:
    first, second = ListSink(), ListSink()
    lost, heir = tracker(first, directory=tmp_path), tracker(second, False, tmp_path)
    for step in range(4):
        lost.step(step, {"train/loss": 1.0})
        heir.step(step, {"train/loss": 1.0})
    assert lost.close()
    assert second.rows == []
    heir.own()
    for step in (3, 4, 5):  # step 3 is redone
        heir.step(step, {"train/loss": 0.5})
    assert heir.close()
    assert first.steps() == [0, 1, 2, 3] and second.steps() == [4, 5]


def test_tracker_next_owner_adds_the_steps_that_the_lost_one_had_not_logged(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"last_step": 1}')
    with EventLog(tmp_path / "steps.jsonl") as steps:
        for epoch, step, loss in ((1, 1, 9.0), (1, 2, 8.0), (1, 3, 7.0), (2, 3, 6.0), (2, 4, 5.0)):
            steps.write({"epoch": epoch, "step": step, "loss": loss, "tokens": 8, "step_s": 2.0})
    sink = ListSink()
    heir = tracker(sink, directory=tmp_path)
    heir.step(4, {"train/loss": 4.0})
    heir.step(5, {"train/loss": 3.0})
    assert heir.close()
    losses = [(step, row["train/loss"]) for step, row in sink.rows]
    assert losses == [(2, 8.0), (3, 6.0), (4, 4.0), (5, 3.0)]
    assert sink.rows[0][1]["train/tokens_per_s"] == 4.0


def test_tracker_of_an_heir_adds_what_had_waited_for_the_sinks_of_the_lost_one(
    tmp_path: Path,
) -> None:
    """They took seconds to open; who gave the sinks up writes what waited, who is lost does not."""
    with EventLog(tmp_path / "steps.jsonl") as steps:
        for step in range(8):
            steps.write({"epoch": 1, "step": step, "loss": float(step)})
    for is_heir, added in ((True, [0, 1, 2, 3, 4, 5, 6, 7]), (False, [6, 7])):
        sink, folder = ListSink(), tmp_path
        (folder / STATE_FILE).unlink(missing_ok=True)
        heir = tracker(sink, owner=False, directory=folder)
        heir.own(logged=5, is_heir=is_heir)
        for step in (6, 7):
            heir.step(step, {"train/loss": float(step)})
        assert heir.close()
        assert sink.steps() == added


def test_tracker_without_a_directory_next_owner_knows_the_steps_it_saw() -> None:
    sink = ListSink()
    heir = tracker(sink, owner=False)
    heir.step(6, {"train/loss": 1.0})
    heir.own()
    heir.step(6, {"train/loss": 1.0})
    heir.step(7, {"train/loss": 1.0})
    assert heir.close()
    assert sink.steps() == [7]


def test_tracker_goes_on_when_a_sink_fails_to_open_or_to_log() -> None:
    class Broken(ListSink):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise RuntimeError("no network")

    def refuse() -> ListSink:
        raise OSError("no server")

    good = ListSink()
    openers = (refuse, Broken, lambda: good)
    subject = Tracker(ElasticConfig(), "run", True, openers=openers)
    subject.step(0, {"train/loss": 1.0})
    assert subject.close()
    assert good.steps() == [0]
    assert subject.problem == "RuntimeError: no network"


def test_tracker_never_waits_for_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaswave_plugin.tracking.tracker.QUEUE_ROWS", 4)
    opening, sink = threading.Event(), ListSink()

    def slow() -> ListSink:
        assert opening.wait(60)
        return sink

    subject = Tracker(ElasticConfig(), "run", True, openers=(slow,))
    for step in range(10):
        subject.step(step, {"train/loss": 1.0})
    assert subject.dropped_rows == 6
    assert not Tracker.close(subject, timeout_s=0.05)  # it is left, after the limit
    opening.set()


def test_tracker_without_sinks_starts_no_thread() -> None:
    before = threading.active_count()
    subject = Tracker(ElasticConfig(), "run", True)
    subject.step(0, {"train/loss": 1.0})
    assert threading.active_count() == before
    assert subject.close()


def test_a_number_that_is_not_known_is_left_out_of_the_row() -> None:
    """As the norm that ZeRO 0 does not compute; one that has overflowed is shown as it is."""
    assert step_metrics({"loss": math.inf, "grad_norm": math.nan}) == {"train/loss": math.inf}


def test_step_metrics_have_the_same_names_everywhere() -> None:
    record = {"loss": 1.5, "grad_norm": 2.0, "lr": 0.1, "step_s": 0.5, "tokens": 100, "slot": 3}
    assert step_metrics(record, live_workers=3) == {
        "train/loss": 1.5,
        "train/grad_norm": 2.0,
        "train/lr": 0.1,
        "train/step_s": 0.5,
        "train/tokens_per_s": 200.0,
        "train/live_workers": 3.0,
    }


def test_a_moment_is_no_metric() -> None:
    fields = {"rung_at_s": 1.7e9, "mttr_s": 0.25, "reason": "x", "phases_s": {"move": 0.1}}
    wanted = {"recovered/mttr_s": 0.25, "recovered/phases_s/move": 0.1}
    assert numbers_of("recovered", fields) == wanted


def test_check_sinks_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    sinks.check_sinks(ElasticConfig())
    with pytest.raises(ConfigurationError, match="no API key was found"):
        sinks.check_sinks(ElasticConfig(wandb="online"))
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="wandb is not installed"):
        sinks.check_sinks(ElasticConfig(wandb="offline"))
    with pytest.raises(ConfigurationError, match="tensorboard is not installed"):
        sinks.check_sinks(ElasticConfig(tensorboard=Path("tb")))


class Holding(ListSink):
    """A sink that tells what it has: steps of earlier owners, and its own but for the lost ones."""

    def __init__(self, held: int, loses: int = 0) -> None:
        super().__init__()
        self._held, self._loses = held, loses

    def last_step(self) -> int | None:
        return max([self._held, *self.steps()]) - (self._loses if self.closed else 0)


def steps_file(folder: Path, count: int) -> None:
    with EventLog(folder / "steps.jsonl") as steps:
        for step in range(count):
            steps.write({"epoch": 1, "step": step, "loss": float(step)})


@pytest.mark.parametrize("is_heir", [True, False])
def test_a_step_counts_as_logged_when_the_sink_has_it(tmp_path: Path, is_heir: bool) -> None:
    """The lost owner had handed over more than came to the sink."""
    steps_file(tmp_path, 9)
    (tmp_path / STATE_FILE).write_text('{"last_step": 7}')
    sink = Holding(2)
    heir = tracker(sink, owner=False, directory=tmp_path)
    heir.own(logged=7, is_heir=is_heir)
    heir.step(9, {"train/loss": 9.0})
    assert heir.close()
    assert sink.steps() == [3, 4, 5, 6, 7, 8, 9]
    assert heir.problem is None


def test_what_a_sink_has_not_got_at_the_end_is_named() -> None:
    sink = Holding(-1, loses=2)
    subject = tracker(sink)
    for step in range(6):
        subject.step(step, {"train/loss": 1.0})
    assert subject.close()
    assert subject.problem == "list has no rows of steps 4 to 5"


def test_a_sink_that_has_all_may_fail_to_close() -> None:
    class Breaking(Holding):
        def close(self) -> None:
            super().close()
            raise ConnectionResetError("Connection lost")

    subject = tracker(Breaking(-1))
    subject.step(0, {"train/loss": 1.0})
    assert subject.close()
    assert subject.problem is None


def test_the_next_owner_waits_until_the_one_before_has_closed_its_sinks(tmp_path: Path) -> None:
    """The one before may still be opening them: neither adds a row twice."""
    opening, held = threading.Event(), Holding(-1)

    def slow() -> ListSink:
        assert opening.wait(60)
        return held

    steps_file(tmp_path, 4)
    before = Tracker(ElasticConfig(), "run", True, directory=tmp_path, openers=(slow,))
    for step in range(3):
        before.step(step, {"train/loss": 1.0})
    before.give_up()
    while not (tmp_path / STATE_FILE).exists():
        assert not opening.is_set()
    after = tracker(held, owner=False, directory=tmp_path)
    after.own(logged=2)
    after.step(3, {"train/loss": 1.0})
    assert held.rows == []
    opening.set()
    assert before.close() and after.close()
    assert held.steps() == [0, 1, 2, 3]
