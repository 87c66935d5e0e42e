"""The summary of a change of layout follows from the events, and from arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.observer.layout_change import simulated_units
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import read_run
from tests.observer.made_up import (
    GLOBAL_BATCH,
    HYBRID,
    KILL_STEP,
    KILLED,
    STEPS,
    Change,
    make_run,
    same,
)

FIELDS = {"layout_before", "layout_after", "plan", "measured_step_s"}


def summary(folder: Path, change: Change = same, **how: Any) -> dict[str, Any]:
    run = make_run(folder, killed=True, hybrid=True, change=change)
    got = summarize(read_run(run), None, steps=STEPS, global_batch=GLOBAL_BATCH, **how)
    return dict(json.loads(json.dumps(got)))


def with_fields(**fields: Any) -> Change:
    def change(name: str, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, **fields} if record.get("kind") == "recovered" else record

    return change


def test_summary_of_a_hybrid_run_has_layouts_and_work(tmp_path: Path) -> None:
    got = summary(tmp_path)
    assert ParallelLayout.from_json(got["layout_before"]) == HYBRID
    cuts = [tuple(span["cuts"]) for span in got["throughput"]]
    assert cuts == [HYBRID.cuts, ParallelLayout.from_json(got["layout_after"]).cuts]
    assert ParallelLayout.from_json(got["layout_after"]) == HYBRID.without([KILLED])
    plan = got["plan"]
    assert plan["dataflow"] == "redeal" and plan["bytes_to_move"] == 304
    assert plan["layers_per_stage"] == [[[0, 2]], [[2, 4]]]
    # In turn at the wide first stage; with one slot more in flight there than at launch.
    assert plan["windows"] == [3, 1]
    by_worker = {"0": [0, 2, 4], "1": [1, 3, 5], "3": [0, 1, 2, 3, 4, 5]}
    assert plan["microbatches_per_worker"] == by_worker
    assert plan["samples_per_worker"] == {"0": 6, "1": 6, "3": 12}


# In layers' forwards, with 2 layers a stage and a backward twice a forward: 1F1B of 3 micro-batches
# over 2 stages is (3 + 1) 6 = 24; 6 of them at one worker of the last stage wait for the first
# forward (2), run for 6 x 6 and are followed by the last backward of the first stage (4): 42.
# All work is 6 micro-batches x 2 stages x 6 = 72, however it is dealt.
@pytest.mark.parametrize(
    ("processors", "ratio"), [(64, 42 / 24), (3, 42 / 24), (2, 42 / 36), (1, 72 / 72)]
)
def test_predicted_step_is_the_healthy_one_times_the_simulated_ratio(
    processors: int, ratio: float, tmp_path: Path
) -> None:
    got = summary(tmp_path, with_fields(processors=processors))
    plan = got["plan"]
    assert plan["simulated"] is True and plan["processors"] == processors
    assert plan["predicted_step_ratio"] == pytest.approx(ratio)
    assert plan["predicted_step_s"] == pytest.approx(0.1 * ratio)
    assert got["measured_step_s"] == got["median_step_s"]["after"] == 0.125


def test_what_the_plan_predicted_stands_beside_what_the_steps_took(tmp_path: Path) -> None:
    assert summary(tmp_path / "early")["plan"]["planned_step_s"] is None
    plan = summary(tmp_path / "measured", with_fields(predicted_step_s=0.15))["plan"]
    assert (plan["planned_step_s"], plan["planned_step_error"]) == (0.15, pytest.approx(0.2))


def test_all_model_chunks_of_an_interleaved_pipeline_are_simulated() -> None:
    for vpp in (1, 2):
        layout = launch_layout(tp=2, pp=2, dp=2, num_layers=4, vpp=vpp)
        for one in (layout, layout.without([3])):
            flow = flow_of(layout=one, num_microbatches=8)
            # 8 micro-batches x 4 layers x (1 + 2), on both workers of a TP group.
            assert simulated_units(flow, processors=1) == 8 * 4 * 3 * 2
            assert simulated_units(flow, processors=64) < 8 * 4 * 3


def test_processors_of_several_nodes_are_added(tmp_path: Path) -> None:
    def two_nodes(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if record.get("kind") == "worker_started":
            return {**record, "node": record["slot"] % 2}
        return with_fields(processors=1)(name, record) or record

    assert summary(tmp_path, two_nodes)["plan"]["processors"] == 2


def test_a_loss_before_a_healthy_step_was_counted_has_no_prediction(tmp_path: Path) -> None:
    def one_step(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
        return None if name == "steps" and record["step"] in (1, 2) else record

    plan = summary(tmp_path, one_step)["plan"]
    assert plan["predicted_step_s"] is None and plan["predicted_step_ratio"] > 1


def test_a_data_parallel_run_has_none_of_it(tmp_path: Path) -> None:
    for killed in (True, False):
        run = make_run(tmp_path / str(killed), killed=killed)
        got = summarize(read_run(run), None, steps=STEPS, global_batch=GLOBAL_BATCH)
        assert not FIELDS & set(got)
    assert set(summary(tmp_path / "hybrid")) >= FIELDS


def test_two_changes_are_told_from_the_first_layout_to_the_last(tmp_path: Path) -> None:
    last = HYBRID.without([KILLED]).without([0])

    def and_another(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if record.get("kind") == "recovered" and record["slot"] == 3:
            pieces = [[[[k, 2 * k, 2 * k + 2] for k in range(6)]] for _ in range(2)]
            changed = {"layout_before": record["layout_after"], "layout_after": last.to_json()}
            changed |= {"pieces": pieces, "windows": [2, 1]}
            return {**record, **changed, "epoch": 3, "bytes_moved": 100}
        return record

    got = summary(tmp_path, and_another)
    assert ParallelLayout.from_json(got["layout_before"]) == HYBRID
    assert ParallelLayout.from_json(got["layout_after"]) == last
    assert got["plan"]["samples_per_worker"] == {"1": 12, "3": 12}
    assert got["plan"]["bytes_to_move"] == 404


def test_reports_that_differ_are_named_and_the_run_is_judged(tmp_path: Path) -> None:
    def one_differs(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if record.get("kind") == "recovered" and record["slot"] == 3:
            return {**record, "layout_after": HYBRID.without([0]).to_json(), "restored_step": 9}
        return record

    got = summary(tmp_path, one_differs)
    assert got["differing_reports"] == [
        "workers 0 and 3 report different layout_after of view 2",
        "workers 0 and 3 report different restored_step of view 2",
    ]
    assert ParallelLayout.from_json(got["layout_after"]) == HYBRID.without([KILLED])
    assert got["recoveries"][0]["restored_step"] == KILL_STEP
    assert summary(tmp_path / "alike")["differing_reports"] == []


def test_who_comes_back_has_no_say_about_the_layout_before(tmp_path: Path) -> None:
    """Nor has one whose recovery was interrupted: it tells of the layout before both changes."""

    def and_a_return(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if record.get("kind") == "recovered" and record["slot"] != 0:
            returned = {
                **record,
                "epoch": 3,
                "layout_after": HYBRID.to_json(),
                "newcomers": ["2.1"],
            }
            flow = flow_of(layout=HYBRID, num_microbatches=6, micro_batch_size=2)
            returned |= {"pieces": flow.pieces, "windows": flow.windows}
            if record["slot"] == 3:
                del returned["layout_before"]
            return returned
        return record

    got = summary(tmp_path, and_a_return)
    assert got["differing_reports"] == []
    assert got["layout_before"] == got["layout_after"] == HYBRID.to_json()
