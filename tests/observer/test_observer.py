"""The outside reader finds what is true of a run, and each thing that could be wrong with it."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from elaswave_plugin.config import Kill
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer import observer
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.report_screen import draw_summary
from elaswave_plugin.observer.run import read_run
from elaswave_plugin.tracking.state_dump import StateDumpError, differing_names, hash_state
from tests.observer.made_up import (
    GLOBAL_BATCH,
    KILL_STEP,
    KILLED,
    NAMES,
    STEPS,
    Change,
    make_run,
    same,
    write_state,
)

WANTED = Kill(slot=KILLED, step=KILL_STEP)


def summary(tmp_path: Path, change: Change = same, flip: bool = False) -> dict[str, Any]:
    run = make_run(tmp_path / "run", killed=True, change=change)
    reference = make_run(tmp_path / "reference", killed=False)
    write_state(run, workers=3, epoch=2, flip=flip)
    write_state(reference, workers=4)
    return summarize(
        read_run(run),
        read_run(reference),
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        kills=[WANTED],
    )


def test_summary_of_a_recovered_run(tmp_path: Path) -> None:
    got = summary(tmp_path)
    recovery_reason = "worker 2 (node 0) exited: killed by SIGKILL"
    losses = [5.0 / (step + 1) for step in range(STEPS)]
    assert got["steps"] == STEPS
    assert got["losses"] == losses and got["reference_losses"] == losses
    assert got["max_abs_loss_diff"] == 0.0 and got["disagreeing_steps"] == []
    assert got["kills"] == [{"slot": 2, "step": 3, "phase": "backward", "fired": True}]
    assert got["parameters_equal"] is True
    assert got["state_sha256"]["run"] == got["state_sha256"]["reference"]
    assert got["survivor_pids_unchanged"] is True
    assert (got["samples_lost"], got["samples_repeated"]) == (0, 0)
    assert got["median_step_s"] == {"before": 0.1, "after": 0.125}
    launch, after = got["throughput"]
    assert (launch["epoch"], launch["reason"], launch["first_step"]) == (1, "launch", 0)
    assert (after["epoch"], after["reason"], after["first_step"]) == (2, recovery_reason, KILL_STEP)
    assert launch["steps"] + after["steps"] == STEPS
    rates = [(span["median_step_s"], span["tokens_per_s"]) for span in (launch, after)]
    assert rates == [(0.1, pytest.approx(12000.0)), (0.125, pytest.approx(9600.0))]
    assert got["snapshot_overhead_ratio"] is None and got["snapshot_overhead_reason"]
    (recovery,) = got["recoveries"]
    assert recovery["epoch"] == 2 and recovery["restored_step"] == KILL_STEP
    assert recovery["reason"] == recovery_reason
    assert recovery["bytes_moved"] == 304 and recovery["survivors"] == [0, 1, 3]
    # 0.25 s down + 0.125 s for the step; the last survivor, slot 3, is 3 ms later.
    assert recovery["mttr_s"] == pytest.approx(0.378)
    assert recovery["phases_s"]["detect"] == pytest.approx(0.002)
    assert recovery["phases_s"]["replay"] == pytest.approx(0.13)
    json.dumps(got)


def test_what_a_loss_cost_counts_from_the_beginning_of_its_step(tmp_path: Path) -> None:
    """Runs of versions that do not tell it have no such figure."""

    def told(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        if record.get("kind") != "recovered":
            return record
        # Of steps that took 0.1 s; the loss struck when 0.06 s were done, of which 0.05 s are kept.
        return {**record, "begun_at_s": 1.3 - 0.06, "kept_s": 0.05 - record["slot"] / 100}

    (recovery,) = summary(tmp_path, change=told)["recoveries"]
    done_s = 1.3 + 0.25 + 0.125 + 0.003
    assert recovery["step_before_s"] == 0.1
    assert recovery["cost_s"] == pytest.approx(done_s - (1.3 - 0.06) - 0.1)
    assert recovery["whole_cost_s"] == pytest.approx(recovery["cost_s"] + 0.05)
    shown = StringIO()
    Console(file=shown, width=200).print(draw_summary(summary(tmp_path / "again", change=told)))
    assert "3.38 of a step; with all of that step again about 3.88" in shown.getvalue()
    (recovery,) = summary(tmp_path / "old")["recoveries"]
    assert recovery["cost_s"] is recovery["whole_cost_s"] is None


def test_a_loss_in_the_first_step_leaves_nothing_from_before(tmp_path: Path) -> None:
    """The launch has no complete step: no time is called that of the healthy job."""

    def early(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        is_step = name.startswith("steps") and record["step"] < KILL_STEP
        return None if is_step and record["epoch"] == 1 else record

    got = summary(tmp_path, change=early)
    (span,) = got["throughput"]
    assert (span["epoch"], span["reason"]) == (2, "worker 2 (node 0) exited: killed by SIGKILL")
    assert got["median_step_s"] == {"before": None, "after": 0.125}


def test_summary_passes_on_a_measured_overhead(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, killed=False))
    got = summarize(run, None, steps=6, global_batch=12, snapshot_overhead_ratio=1.01)
    assert got["snapshot_overhead_ratio"] == 1.01 and got["snapshot_overhead_reason"] is None
    assert got["parameters_equal"] is None and got["max_abs_loss_diff"] is None
    assert got["recoveries"] == [] and got["kills"] == []
    assert got["median_step_s"] == {"before": 0.1, "after": None}


def test_summary_control_one_flipped_bit(tmp_path: Path) -> None:
    got = summary(tmp_path, flip=True)
    assert got["parameters_equal"] is False
    assert got["differing_parameters"] == ["decoder.bias"]


def test_summary_control_one_missing_and_one_repeated_micro_batch(tmp_path: Path) -> None:
    def drop(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        gone = name == "ledger" and (record["step"], record["epoch"], record["k"]) == (3, 2, 1)
        return None if gone else record

    def swap(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if name == "ledger" and record["step"] == 4 and record["k"] == 0:
            return {**record, "samples": [50, 50]}
        return record

    got = summary(tmp_path / "a", drop)
    assert (got["samples_lost"], got["samples_repeated"]) == (2, 0)
    got = summary(tmp_path / "b", swap)  # 48 and 49 are lost, 50 is taken twice more
    assert (got["samples_lost"], got["samples_repeated"]) == (2, 2)


def test_summary_control_a_step_that_was_never_completed(tmp_path: Path) -> None:
    def stop(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        return None if name == "steps" and record["step"] == STEPS - 1 else record

    got = summary(tmp_path, stop)
    assert got["steps"] == STEPS - 1 and got["samples_lost"] == GLOBAL_BATCH


def test_summary_control_the_abandoned_attempt_alone_does_not_count(tmp_path: Path) -> None:
    def drop(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        gone = name == "ledger" and record["step"] == KILL_STEP and record["epoch"] == 2
        return None if gone else record

    assert summary(tmp_path, drop)["samples_lost"] == GLOBAL_BATCH


def test_summary_control_changed_process(tmp_path: Path) -> None:
    def restarted(name: str, record: dict[str, Any]) -> dict[str, Any]:
        late = name == "steps" and record["slot"] == 1 and record["step"] >= 4
        return {**record, "pid": 7777} if late else record

    def twice_started(name: str, record: dict[str, Any]) -> dict[str, Any]:
        other = record.get("kind") == "worker_started" and record["slot"] == 3
        return {**record, "pid": 7777} if other else record

    def gone(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        late = name == "steps" and record["slot"] == 1 and record["step"] == STEPS - 1
        return None if late else record

    for index, change in enumerate((restarted, twice_started, gone)):
        assert summary(tmp_path / str(index), change)["survivor_pids_unchanged"] is False


def test_summary_control_kill_that_did_not_fire(tmp_path: Path) -> None:
    def quiet(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        return None if record.get("kind") == "fault_fired" else record

    def alive(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        return None if record.get("kind") == "worker_exited" else record

    for index, change in enumerate((quiet, alive)):
        assert summary(tmp_path / str(index), change)["kills"][0]["fired"] is False


def test_summary_control_loss_that_differs_in_the_last_bit(tmp_path: Path) -> None:
    def nudge(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if name == "steps" and record["step"] == 5:
            loss = float(np.nextafter(record["loss"], 2))
            return {**record, "loss": loss, "loss_hex": loss.hex()}
        return record

    def one_worker(name: str, record: dict[str, Any]) -> dict[str, Any]:
        return nudge(name, record) if record.get("slot") == 3 else record

    assert 0 < summary(tmp_path / "a", nudge)["max_abs_loss_diff"] < 1e-15
    assert summary(tmp_path / "b", one_worker)["disagreeing_steps"] == [5]


def test_summary_without_fault_event_times_the_recovery_from_the_exit(tmp_path: Path) -> None:
    def quiet(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        return None if record.get("kind") == "fault_fired" else record

    (recovery,) = summary(tmp_path, quiet)["recoveries"]
    assert recovery["mttr_s"] == pytest.approx(0.377)


def test_tokens_per_s_adds_the_workers(tmp_path: Path) -> None:
    rates = observer.tokens_per_s(read_run(make_run(tmp_path, killed=True)))
    assert rates[0] == pytest.approx(12_000) and rates[5] == pytest.approx(9_600)


def test_read_run_of_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no events\.jsonl, wanted the directory"):
        read_run(tmp_path)
    make_run(tmp_path, killed=True)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(ConfigurationError, match=r"holds no ledger\.jsonl"):
        read_run(tmp_path)  # without it no sample would count as lost
    (tmp_path / "ledger.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigurationError, match=r"ledger\.jsonl' has records without 'epoch'"):
        read_run(tmp_path)


def test_state_hash_does_not_depend_on_the_cut_and_takes_the_last_epoch(tmp_path: Path) -> None:
    hashes = set()
    for workers in (1, 2, 3, 5):
        folder = tmp_path / str(workers)
        write_state(folder, workers=5, epoch=1, flip=True)  # an older epoch of more workers
        write_state(folder, workers=workers, epoch=2)
        state = hash_state(folder)
        assert (state.step, state.epoch) == (STEPS - 1, 2)
        hashes.add(state.sha256)
    assert len(hashes) == 1


def test_state_hash_control_every_bit_and_every_part_counts(tmp_path: Path) -> None:
    write_state(tmp_path / "a", workers=2)
    write_state(tmp_path / "b", workers=2, flip=True)
    first, second = hash_state(tmp_path / "a"), hash_state(tmp_path / "b")
    assert first.sha256 != second.sha256
    assert differing_names(first, second) == ("decoder.bias",)


def test_state_hash_control_gap_overlap_and_stray_pieces(tmp_path: Path) -> None:
    def broken(name: str, pieces: dict[str, Any], words: str) -> None:
        folder = write_state(tmp_path / name, workers=2)
        kept = dict(np.load(folder / "slot-1.npz"))
        np.savez(folder / "slot-1.npz", **{**kept, **pieces})
        with pytest.raises(StateDumpError, match=words):
            hash_state(tmp_path / name)

    bias = NAMES[0][0]
    ones = np.ones(3, np.float32)
    broken("overlap", {f"{bias}|master|0": ones}, "disagrees with another worker's piece")
    broken("outside", {f"{bias}|master|4": ones}, "lies outside of")
    broken("unknown", {"other|master|0": ones}, "is not announced")
    broken("part", {f"{bias}|moment|0": ones}, "is not announced")
    broken("dtype", {f"{bias}|master|0": ones.astype(np.float64)}, "wanted float32")
    folder = write_state(tmp_path / "gap", workers=2)
    (folder / "slot-1.json").unlink()
    with pytest.raises(StateDumpError, match=r"decoder\.bias\|exp_avg has a gap at element 2 of 5"):
        hash_state(tmp_path / "gap")
    with pytest.raises(StateDumpError, match="holds no state of step 9"):
        hash_state(tmp_path / "gap", 9)


def test_state_hash_agreeing_overlap_is_no_error(tmp_path: Path) -> None:
    whole = write_state(tmp_path / "a", workers=1)
    write_state(tmp_path / "b", workers=2)
    target = tmp_path / "b" / "state" / whole.name
    for end in ("npz", "json"):
        (target / f"slot-7.{end}").write_bytes((whole / f"slot-0.{end}").read_bytes())
    assert hash_state(tmp_path / "b").sha256 == hash_state(tmp_path / "a").sha256


@pytest.mark.parametrize("missing", [None, 5, 11])
def test_batches_that_ramp_up_are_counted_by_where_each_ends(
    tmp_path: Path, missing: int | None
) -> None:
    sizes = (4, 8, *(STEPS - 2) * (GLOBAL_BATCH,))

    def ramp(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if name != "ledger":
            return record
        step = record["step"]
        places = [one - step * GLOBAL_BATCH for one in record["samples"]]
        ids = [sum(sizes[:step]) + place for place in places if place < sizes[step]]
        return {**record, "samples": [one for one in ids if one != missing]}

    run = read_run(make_run(tmp_path / "run", killed=True, change=ramp))
    got = summarize(run, None, steps=STEPS, global_batch=None)
    assert (got["samples_lost"], got["samples_repeated"]) == (int(missing is not None), 0)


def test_a_commit_that_was_told_again_counts_once(tmp_path: Path) -> None:
    """The leader's agent died after a commit; whether its line was written nobody can know."""
    lines = [{"epoch": 1, "ranks": [0, 1]}, {"epoch": 2, "ranks": [0]}]
    run = make_run(tmp_path / "run", killed=True)
    with open(run / "events.jsonl", "a") as file:
        for line in [*lines, {"epoch": 3, "ranks": [0, 3]}]:
            again = {"kind": "view_committed", "time_s": 99.0, "reason": "", "again": True, **line}
            file.write(json.dumps(again) + "\n")
    told = read_run(run).of_kind("view_committed")
    assert [one["epoch"] for one in told] == [1, 2, 3]
    assert [one.get("again", False) for one in told] == [False, False, True]
