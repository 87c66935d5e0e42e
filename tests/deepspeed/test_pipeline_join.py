"""A worker of a DeepSpeed pipeline comes back; with the last of a pipeline the grid is whole."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, EngineSpec, as_it_counted, check_recovered
from tests.deepspeed.test_fp16 import ALLOWED, FP16, scales, skipped
from tests.deepspeed.test_join import entered, sizes
from tests.deepspeed.test_pipeline import PAIRS, PP2_DP2, check_pipeline, seen_by
from tests.faults.harness import Outcome, Zygote, check_survived, max_relative_difference
from tests.faults.test_node_join import lose_and_join, lose_with_standby
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STEPS, BACK = 9, 6


def spec_of(slot: int, phase: str, **more: object) -> EngineSpec:
    """Killed in step 2, back before step 6."""
    kills, changes = (f"{slot}@2:{phase}",), (f"+{slot}@{BACK}",)
    return replace(PP2_DP2, steps=STEPS, respawn=5, kills=kills, changes=changes, **more)  # type: ignore[arg-type]


def check_back(run: Outcome, *, slots: tuple[int, ...], before: int = BACK) -> None:
    """They entered before that step, and from there on every worker has its part of the launch."""
    assert sorted(entered(run))[: len(slots)] == [(slot, 1, before) for slot in sorted(slots)]
    assert run.events("view_committed")[-1]["ranks"] == [*range(run.spec.nproc)]
    width = run.spec.nproc // run.spec.stages
    for step in range(before, run.spec.steps):
        lines = [line for line in run.files.ledger if line["step"] == step]
        dealt = sorted((line["k"], line["slot"]) for line in lines)
        assert dealt == [(k, k % width) for k in range(width * run.spec.accumulation)]
    check_scripts(run, before=before)


def who_ran(run: Outcome, step: int) -> set[int]:
    """The first workers of the pipelines that ran a step."""
    return {line["slot"] for line in run.files.ledger if line["step"] == step}


def files_in(folder: Path) -> list[str]:
    """Names of a checkpoint's files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def check_scripts(run: Outcome, *, before: int) -> None:
    """The script of who came back counts every step, and has the losses from there on."""
    reports = seen_by(run)
    assert len(reports) == run.spec.nproc
    whole = next(one for one in reports if not any(math.isnan(loss) for *_, loss in one["seen"]))
    for report in reports:
        assert report["same_objects"] and report["lr"] == whole["lr"]
        assert [counts for *counts, _ in report["seen"]] == [counts for *counts, _ in whole["seen"]]
        late = [math.isnan(loss) for *_, loss in report["seen"]]
        assert late in ([False] * len(late), [step < before for step in range(len(late))])
        for (*_, loss), (*_, other) in zip(report["seen"], whole["seen"], strict=True):
            assert math.isnan(loss) or loss == pytest.approx(other, rel=1e-6)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("slot", "phase", "stage", "bf16"),
    sampled(PAIRS),
)
def test_a_lost_worker_comes_back_to_its_pipeline(
    run: Launch, twin: Twin, reference: Launch, slot: int, phase: str, stage: int, bf16: bool
) -> None:
    spec = spec_of(slot, phase, stage=stage, bf16=bf16)
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    check_back(killed, slots=(slot,))
    assert sizes(killed) == [4, 3, 4]


# A whole pipeline: the second one is lost as a worker without one.
BOTH = {"13": ("1@2:forward", "3@4:data"), "02": ("2@2:backward", "0@4:data")}
# Which workers are lost; what the script is given, what is added to the configuration.
WAYS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("0", "--tied", {}),
    ("3", "--tied", {}),
    ("13", "--data-iter", {}),
    ("02", "--recompute", {"pipeline": {"use_reentrant": False}}),
    # The same masks, on whichever pipeline runs a micro-batch.
    ("1", "--dropout=0.1", {}),
    ("2", "--seed-layers", {}),
    ("13", "--frozen", {}),
    ("0", "--table", {}),
    # Epochs of nine micro-batches a pipeline: a step goes over the end of one.
    ("3", "--limit=37", {"dataloader_drop_last": True}),
    ("0", "--counted", {}),
    ("2", "--agree", {}),
)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("slots", "option", "settings"), WAYS)
def test_what_scripts_do(
    run: Launch,
    twin: Twin,
    reference: Launch,
    slots: str,
    option: str,
    settings: dict[str, object],
    stage: int,
) -> None:
    """Also a whole pipeline, whose workers come back to the same step."""
    spec = replace(
        spec_of(0, "forward", stage=stage, options=(option,), settings=json.dumps(settings)),
        kills=BOTH.get(slots, (f"{slots}@2:forward",)),
        changes=tuple(f"+{slot}@{BACK}" for slot in slots),
    )
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    check_back(killed, slots=tuple(map(int, slots)))


# The newcomer of this slot asks to be let in once a step is complete that the other one was in.
A_STEP_LATER = """
import json, time
from elaswave_plugin.recovery.worker import Worker
ask = Worker.ask_to_enter
def ask_later(self):
    deadline_s = time.monotonic() + 60
    while self.slot == {slot} and time.monotonic() < deadline_s:
        lines = [json.loads(line) for line in open(self.config.dir / "events.jsonl")]
        if any(line["kind"] == "recovered" and line["newcomers"] for line in lines):
            break
        time.sleep(0.02)
    ask(self)
Worker.ask_to_enter = ask_later
"""


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_is_whole_once_all_of_its_stages_have_a_worker(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    """The first worker to come back looks on, and has the losses."""
    changes = (f"+3@{BACK}", f"+1@{BACK + 2}")
    spec = replace(
        spec_of(1, "forward", stage=stage, sabotage=A_STEP_LATER.format(slot=1)),
        steps=11,
        kills=BOTH["13"],
        changes=changes,
    )
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    assert entered(killed) == [(3, 1, BACK), (1, 1, BACK + 2)]
    assert sizes(killed) == [4, 3, 2, 3, 4]
    assert who_ran(killed, BACK + 1) == {0} and who_ran(killed, BACK + 2) == {0, 1}
    missed = sorted(sum(math.isnan(loss) for *_, loss in one["seen"]) for one in seen_by(killed))
    assert missed == [0, 0, BACK, BACK + 2]


@proves(Kind.RETURN, Promise.PLANNED, victim="1 3", moment="2:backward 4:forward")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_survivors_of_two_pipelines_part_again(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    """Six workers, three pipelines: each goes back to that of its launch."""
    spec = replace(
        spec_of(1, "forward", stage=stage, global_batch=12, accumulation=2),
        sabotage=A_STEP_LATER.format(slot=3),
        nproc=6,
        steps=11,
        kills=("1@2:backward", "3@4:forward"),
        changes=(f"+1@{BACK}", f"+3@{BACK + 2}"),
    )
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    assert sizes(killed) == [6, 5, 4, 5, 6]
    assert [who_ran(killed, step) for step in (5, 7, 8)] == [{0, 2}, {1, 2}, {0, 1, 2}]


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_middle_stage_of_four_comes_back(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    options = ("--num-layers=4", "--stages=4")
    spec = replace(spec_of(3, "forward", stage=stage, stages=4, options=options), nproc=8)
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    check_back(killed, slots=(3,))


# The newcomer dies in the middle of what the others have behind them.
DIES_ON_ITS_WAY = """
import os, signal
from elaswave_plugin.loops.call_log import CallLog
passing = CallLog._pass
def die(self):
    if self.worker.member.incarnation == 1 and self._passed == 3:
        self.worker.events.emit("died_on_its_way", slot=self.worker.slot)
        os.kill(os.getpid(), signal.SIGKILL)
    passing(self)
CallLog._pass = die
"""


@proves(Kind.NEWCOMER, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("death", ["0:startup", "0:agree", "0:move", "0:verify", "6:backward", ""])
def test_a_newcomer_dies_while_it_is_built_or_enters(
    run: Launch, twin: Twin, reference: Launch, death: str, stage: int
) -> None:
    spec = spec_of(1, "backward", stage=stage)
    dying = replace(spec, kills=(*spec.kills, *(f"1.1@{one}" for one in [death] if one)))
    killed = run(replace(dying, sabotage="" if death else DIES_ON_ITS_WAY))
    counted = as_it_counted(killed)
    check_survived(killed)
    assert killed.trace() == twin(replace(counted, sabotage="")).trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6
    assert len(killed.events("died_on_its_way")) == (not death)
    assert entered(killed)[-1] == (1, 2, BACK)
    assert killed.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]


@proves(Kind.RETURN_LOSS, Promise.PLANNED)
@pytest.mark.parametrize("stage", sampled([0, 1]))
@pytest.mark.parametrize(
    "kill", sampled(["1.1@7:backward", "0@6:data", "2@7:reduce", "3@8:gather"])
)
def test_another_loss_after_the_return(
    run: Launch, twin: Twin, reference: Launch, kill: str, stage: int
) -> None:
    """Of who came back, and of others: one while the newcomer's script is on its way."""
    spec = spec_of(1, "forward", stage=stage)
    spec = replace(spec, steps=13, kills=(*spec.kills, kill), changes=("+1@6", f"+{kill[0]}@10"))
    killed = run(spec)
    check_survived(killed)
    losses = {
        event["epoch"]: event["restored_step"]
        for event in killed.events("recovered")
        if not event["newcomers"]
    }
    steps = zip(("1", kill[0]), (losses[epoch] for epoch in sorted(losses)), strict=True)
    leaving = tuple(f"{slot}@{step}" for slot, step in steps)
    planned = twin(replace(spec, kills=(), changes=(*leaving, *spec.changes)))
    assert killed.trace() == planned.trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6
    assert sizes(killed) == [4, 3, 4, 3, 4]
    assert [step for *_, step in entered(killed)] == [6, 10]


@proves(Kind.RETURN, Promise.WHOLE, victim="2", moment="1:backward")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_evaluations_and_checkpoints_after_the_return(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    """All of the files of a job that lost nobody, and loaded they are the same model."""
    options = ("--evaluate-at", "1", "5", "7", "--save-at=7")
    spec = spec_of(2, "backward", stage=stage, options=options)
    killed, whole = run(spec), reference(spec)
    check_pipeline(killed, twin, reference)
    check_back(killed, slots=(2,))
    found = sorted(seen_by(killed), key=lambda one: math.isnan(one["evaluations"][0]))
    assert [math.isnan(loss) for loss in found[-1]["evaluations"]] == [True, True, False]
    assert len({one["evaluations"][2] for one in found}) == 1
    assert found[0]["evaluations"] == pytest.approx(seen_by(whole)[0]["evaluations"], rel=1e-6)
    folder = killed.directory / "checkpoints"
    assert files_in(folder) == files_in(whole.directory / "checkpoints")
    loading = replace(
        spec, kills=(), changes=(), options=(f"--load={folder}", "--evaluate-at", "7")
    )
    loaded = run(loading)
    assert loaded.returncode == 0, loaded.output[-4000:]
    for one in seen_by(loaded):
        assert one["evaluations"] == found[0]["evaluations"][2:]
    # Who comes back to that job counts from where it had been loaded, and loads nothing itself.
    again = run(replace(loading, steps=12, kills=("2@1:backward",), changes=("+2@3",)))
    assert again.returncode == 0, again.output[-4000:]
    assert entered(again) == [(2, 1, 3)]
    for one in seen_by(again):
        assert [count for count, *_ in one["seen"]] == [8, 9, 10, 11, 12]


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
def test_steps_that_overflow_before_and_after_the_return(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    settings = json.dumps({"fp16": {**FP16, "initial_scale_power": 18}, "bf16": None})
    spec = spec_of(3, "backward", stage=1, settings=settings, sabotage=ALLOWED)
    spec = replace(spec, steps=12)
    killed, whole = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    assert entered(killed) == [(3, 1, BACK)]
    assert skipped(killed) == skipped(whole) and max(skipped(whole)) > BACK
    assert scales(killed) == scales(whole)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 3])
def test_it_comes_back_when_it_is_ready_where_nobody_has_planned_it(
    run: Launch, reference: Launch, slot: int
) -> None:
    spec = replace(spec_of(slot, "forward", stage=1), steps=90, changes=())
    killed = run(spec)
    check_survived(killed)
    ((_, _, back),) = entered(killed)
    check_back(killed, slots=(slot,), before=back)
    assert max_relative_difference(killed, reference(spec)) <= 1e-6


@proves(Kind.NODE_RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(("slot", "standby"), [(2, False), (0, False), (1, True)])
def test_a_lost_node_comes_back(
    zygote: Zygote, tmp_path: Path, twin: Twin, reference: Launch, slot: int, standby: bool
) -> None:
    spec = replace(spec_of(slot, "", stage=1), nodes=4, kills=())
    where = {"zygote": zygote, "data": tmp_path, "directory": tmp_path / "run"}
    lost = (
        lose_with_standby(spec, slot, **where) if standby else lose_and_join(spec, [slot], **where)
    )
    before = min(event["restored_step"] for event in lost.events("recovered"))
    undisturbed = replace(spec, nodes=1)
    leaving = replace(undisturbed, kills=(f"{slot}@{before}",))
    check_recovered(lost, twin=twin(leaving), reference=reference(undisturbed))
    assert entered(lost) == [(slot, 1, BACK)]
    assert sizes(lost) == [4, 3, 4]


NOT_TOLD = """
from elaswave_plugin.adapters.deepspeed.pipeline.framework import PipelineFramework
PipelineFramework.unsealed = lambda self, told=None: iter(())
"""


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.slow
def test_frozen_parameters_that_nobody_tells_are_seen(run: Launch, reference: Launch) -> None:
    """Negative control."""
    spec = spec_of(2, "forward", stage=1, options=("--frozen",))
    wrong = run(replace(spec, sabotage=NOT_TOLD))
    check_survived(wrong)
    assert max_relative_difference(wrong, reference(spec)) > 1e-4


@proves(Kind.SCRIPT_END, Promise.NAMED)
def test_a_script_that_ends_too_early_is_told(run: Launch) -> None:
    """It begins with another step than those of the others did."""
    spec = spec_of(1, "forward", stage=1, options=("--counted", "--late-steps=1"), dump="never")
    stopped = run(replace(spec, steps=90, changes=()))
    ((_, _, back),) = entered(stopped)
    assert f"has ended after 1 steps of {back} that the others have behind" in stopped.output
    assert stopped.returncode == 0 and sizes(stopped) == [4, 3, 4, 3]
    assert "exit code 2" in [event["status"] for event in stopped.events("worker_exited")]


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.CLOSE, victim="3 2")
@pytest.mark.parametrize("phase", ["backward", "snapshot", "body"])
def test_the_last_of_a_stage_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Launch, phase: str
) -> None:
    kills = ("3@1:backward", f"2@4:{phase}")
    spec = replace(PP2_DP2, steps=STEPS, respawn=5, kills=kills, awaits=((4, 1),))
    survived = run(spec)
    check_survived(survived)
    wanted = reference(replace(spec, awaits=()))
    assert max_relative_difference(survived, wanted) <= FP32_BOUND
    assert entered(survived)[0][:2] == (3, 1)
