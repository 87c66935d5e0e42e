"""A real hybrid run: its summary's layouts and plan, against the raw lines that it left."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measurement import bench
from elaswave_plugin.config import Kill
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.demo.options import GLOBAL_BATCH
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import read_run
from tests.proofs import Kind, Promise, proves

pytest.importorskip("megatron.core")

STEPS = 6
KILL = Kill(slot=1, step=3, phase="forward")


def ledger_of(folder: Path, *, step: int) -> dict[str, list[int]]:
    """The micro-batches of a step by worker of the first stage."""
    found: dict[str, list[int]] = {}
    for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        if line["step"] == step:
            found.setdefault(str(line["slot"]), []).append(line["k"])
    return found


def counts_of(folder: Path, *, step: int) -> dict[str, int]:
    """The number of micro-batches that each worker said it ran in a step."""
    lines = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return {str(line["slot"]): line["num_microbatches"] for line in lines if line["step"] == step}


@proves(Kind.KILL, Promise.EQUAL)
def test_summary_of_a_real_hybrid_run_follows_from_its_files() -> None:
    with bench(pp=2, dp=2, steps=STEPS) as running:
        folder = running.run("run", replace(running.options, kills=(KILL,)), kill=True)
        run = read_run(folder)
        summary = summarize(run, None, steps=STEPS, global_batch=GLOBAL_BATCH, kills=[KILL])
        dealt, counts = ledger_of(folder, step=5), counts_of(folder, step=5)
        before = ledger_of(folder, step=0)
    assert summary["kills"][0]["fired"] and summary["steps"] == STEPS
    assert summary["samples_lost"] == summary["samples_repeated"] == 0
    healthy = launch_layout(tp=1, pp=2, dp=2, num_layers=4)
    assert summary["layout_before"] == healthy.to_json()
    # Nobody comes back, and the narrow stage keeps one layer of its two.
    assert summary["layout_after"] == healthy.without([1]).recut((0, 1, 4)).to_json()
    assert summary["plan"]["layers_per_stage"] == [[[0, 1]], [[1, 4]]]
    work = summary["plan"]["microbatches_per_worker"]
    assert before == {"0": [0, 2, 4, 6], "1": [1, 3, 5, 7]}
    assert dealt == {"0": work["0"]} == {"0": list(range(8))}
    assert counts == {slot: len(ks) for slot, ks in work.items()}
    assert summary["plan"]["samples_per_worker"] == counts  # of one sample each
    assert sorted(work["2"] + work["3"]) == list(range(8))
    assert summary["plan"]["bytes_to_move"] == summary["recoveries"][0]["bytes_moved"] > 0
    assert summary["plan"]["predicted_step_s"] == pytest.approx(
        summary["median_step_s"]["before"] * summary["plan"]["predicted_step_ratio"]
    )
    assert summary["measured_step_s"] == summary["median_step_s"]["after"] > 0
