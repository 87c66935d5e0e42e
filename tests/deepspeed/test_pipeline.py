"""DeepSpeed's pipelines: one that loses a worker is lost, and the others run its micro-batches."""

import itertools
import json
from dataclasses import replace

import pytest

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

PP2_DP2 = EngineSpec(script=str(SCRIPTS / "pipeline.py"), stages=2, accumulation=4, global_batch=16)


def check_pipeline(killed: Outcome, twin: Twin, reference: Launch) -> None:
    """Check what every recovery promises, and that gradients are the mean over the global batch.

    Losses would not show it: Adam makes the same step of a gradient and of its half.
    """
    whole = reference(killed.spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    bound = 2e-2 if killed.spec.bf16 else 1e-5
    wanted = norms(whole)
    assert norms(killed) == {step: pytest.approx(norm, rel=bound) for step, norm in wanted.items()}


def norms(run: Outcome) -> dict[int, float]:
    """The gradient norm of each step, where DeepSpeed keeps it: with ZeRO."""
    found = {record["step"]: record["grad_norm"] for record in run.files.steps}
    return {step: norm for step, norm in found.items() if norm is not None}


def seen_by(run: Outcome) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(run.directory.glob("seen-*.json"))]


# ZeRO stage, bf16: without ZeRO, DeepSpeed takes another optimizer for bf16.
KINDS = ((1, False), (0, False), (1, True))
# Any worker in any phase: of 0 the first stage's rank 0 is left without a pipeline.
PAIRS = [
    (slot, phase, *KINDS[(slot + index) % len(KINDS)])
    for (index, phase), slot in itertools.product(enumerate(STEP_PHASES), (1, 2, 3, 0))
]


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="5:backward")
def test_steps_without_a_seal_are_made_again(run: Launch, twin: Twin, reference: Launch) -> None:
    killed = run(replace(PP2_DP2, steps=8, interval=3, kills=("2@5:backward",)))
    check_pipeline(killed, twin, reference)
    assert {event["restored_step"] for event in killed.events("recovered")} == {3}


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("slot", "phase", "stage", "bf16"),
    sampled(PAIRS),
)
def test_a_kill_in_any_phase_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, slot: int, phase: str, stage: int, bf16: bool
) -> None:
    spec = replace(PP2_DP2, stage=stage, bf16=bf16, kills=(f"{slot}@3:{phase}",))
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    # The pipeline that is left runs what both did, and a step counts once, also for who looks on.
    lines = [line for line in killed.files.ledger if line["step"] == 5]
    assert sorted(line["k"] for line in lines) == list(range(8))
    assert {line["slot"] for line in lines} == {1 - slot % 2}
    reports = seen_by(killed)
    assert len(reports) == 3
    for report in reports:
        assert report["same_objects"] and report["lr"] == reports[0]["lr"]
        assert [count for count, _, _ in report["seen"]] == [1, 2, 3, 4, 5, 6]
        assert [count for _, count, _ in report["seen"]] == [16, 32, 48, 64, 80, 96]
        for (_, _, loss), (_, _, other) in zip(report["seen"], reports[0]["seen"], strict=True):
            assert loss == pytest.approx(other, rel=1e-6)


# What the script is given, what is added to the configuration.
WAYS = (
    ("--tied", {}),
    ("--data-iter", {}),
    ("--recompute", {"pipeline": {"use_reentrant": False}}),
    # The same masks, on whichever pipeline runs a micro-batch.
    ("--dropout=0.1", {}),
    ("--seed-layers", {}),
    # Epochs of nine micro-batches a pipeline: a step goes over the end of one.
    ("--limit=37", {"dataloader_drop_last": True}),
)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("option", "settings"), WAYS, ids=[option for option, _ in WAYS])
def test_what_scripts_do(
    run: Launch,
    twin: Twin,
    reference: Launch,
    option: str,
    settings: dict[str, object],
    stage: int,
) -> None:
    spec = replace(
        PP2_DP2,
        stage=stage,
        options=(option,),
        settings=json.dumps(settings),
        kills=("1@3:backward",),
    )
    check_pipeline(run(spec), twin, reference)


@proves(Kind.KILLS, Promise.PLANNED, victim="1 3", moment="2:backward 4:forward")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_survivors_of_two_pipelines_are_one_again(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    """Six workers, three pipelines: two losses in different stages cost one of them."""
    spec = replace(
        PP2_DP2,
        nproc=6,
        global_batch=12,
        accumulation=2,
        stage=stage,
        kills=("1@2:backward", "3@4:forward"),
    )
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    last = [line for line in killed.files.ledger if line["step"] == 5]
    assert {line["slot"] for line in last} == {0, 2}
    plans = [event["plan"] for event in killed.events("recovered")]
    assert any("w0: 0 3 1 | w2: 2 5 4 | w4: 0 3 1 | w5: 2 5 4" in plan for plan in plans)


@proves(Kind.KILL, Promise.PLANNED, victim="3", moment="2:forward")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_four_stages_lose_a_middle_one(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    options = ("--num-layers=4", "--stages=4")
    spec = replace(PP2_DP2, nproc=8, stages=4, stage=stage, options=options, kills=("3@2:forward",))
    killed = run(spec)
    check_pipeline(killed, twin, reference)


@proves(Kind.IN_RECOVERY, Promise.PLANNED, victim="1")
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["detect", "agree", "edit", "move", "rebind", "verify", "replay"])
def test_the_other_worker_of_the_pipeline_is_lost_in_the_recovery(
    run: Launch, twin: Twin, reference: Launch, phase: str
) -> None:
    # The free worker replays nothing; one of the first step's is killed where nobody is free.
    spec = replace(PP2_DP2, stage=1, kills=("1@3:backward", f"3@3:{phase}"))
    if phase == "replay":
        spec = replace(
            spec, nproc=6, global_batch=12, accumulation=2, kills=("1@3:backward", f"5@3:{phase}")
        )
    killed = run(spec)
    check_survived(killed)
    both = replace(spec, kills=tuple(kill.split(":")[0] + ":data" for kill in spec.kills))
    assert killed.trace() == twin(both).trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0@1:data", "3@1:backward", "1@1:gather"])
def test_a_kill_in_the_first_steps(run: Launch, twin: Twin, reference: Launch, kill: str) -> None:
    spec = replace(PP2_DP2, stage=1, kills=(kill,))
    killed = run(spec)
    check_pipeline(killed, twin, reference)


@proves(Kind.KILL, Promise.STOPS, victim="1", moment="2:backward")
def test_a_stage_with_nobody_left_ends_the_job_in_words(run: Launch) -> None:
    stopped = run(replace(PP2_DP2, stage=1, nproc=2, global_batch=8, kills=("1@2:backward",)))
    assert stopped.returncode == 1
    assert "stage 1 has no worker left, and in DeepSpeed's pipelines no worker" in stopped.output
    assert "Traceback" not in stopped.output and not stopped.orphans


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("slot", range(4))
def test_a_kill_in_an_evaluation(run: Launch, twin: Twin, reference: Launch, slot: int) -> None:
    options = ("--evaluate-at", "1", "3", "5")
    spec = replace(PP2_DP2, stage=1, options=options, kills=(f"{slot}@3:evaluation",))
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    (wanted,) = {tuple(one["evaluations"]) for one in seen_by(reference(spec))}
    (found,) = {tuple(one["evaluations"]) for one in seen_by(killed)}
    assert len(found) == 3 and found == pytest.approx(wanted, rel=1e-6)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--with-logits", "--guarded"])
@pytest.mark.parametrize("kill", ["1@2:backward", "1@3:evaluation"])
def test_evaluations_of_other_kinds(
    run: Launch, twin: Twin, reference: Launch, kill: str, option: str
) -> None:
    """Three stages, whose middle one reads no data; logits; inside of other guarded work."""
    options = ("--num-layers=4", "--stages=3", "--evaluate-at", "1", "3", "5")
    spec = replace(PP2_DP2, nproc=6, stages=3, stage=1, options=(*options, option), kills=(kill,))
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    (wanted,) = {tuple(one["evaluations"]) for one in seen_by(reference(spec))}
    (found,) = {tuple(one["evaluations"]) for one in seen_by(killed)}
    assert len(found) == 3 and found == pytest.approx(wanted, rel=1e-6)


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="3:gather")
@pytest.mark.slow
def test_the_rate_of_who_looks_on_is_that_of_the_others(run: Launch, reference: Launch) -> None:
    """Also where the schedule goes on from the rate of the last step, not from its number."""
    settings = json.dumps({"scheduler": None})
    spec = replace(PP2_DP2, stage=1, options=("--halving",), settings=settings)
    killed = run(replace(spec, kills=("2@3:gather",)))
    check_survived(killed)
    rates = [report["lr"] for report in seen_by(killed)]
    assert len(rates) == 3 and len({tuple(rate) for rate in rates}) == 1  # type: ignore[arg-type]
    assert rates[0] == seen_by(reference(spec))[0]["lr"]


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kill", ["2@3:save", "1@2:backward"])
def test_a_checkpoint_after_a_loss_loads_in_a_smaller_job(
    run: Launch, reference: Launch, kill: str, stage: int
) -> None:
    options = ("--save-at=3", "--evaluate-at", "3")
    spec = replace(PP2_DP2, stage=stage, options=options, kills=(kill,))
    killed = run(spec)
    check_survived(killed)
    assert max_relative_difference(killed, reference(spec)) <= 1e-6
    folder = killed.directory / "checkpoints"
    assert (folder / "latest").read_text() == "global_step3"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["global_step3"]
    (saved,) = {tuple(one["evaluations"]) for one in seen_by(killed)}
    loading = run(
        replace(
            spec,
            nproc=2,
            global_batch=8,
            kills=(),
            options=(f"--load={folder}", "--evaluate-at", "3"),
        )
    )
    assert loading.returncode == 0, loading.output[-4000:]
    for one in seen_by(loading):
        assert one["evaluations"] == list(saved)
        assert [count for count, _, _ in one["seen"]] == [4, 5, 6]  # type: ignore[attr-defined]


REFUSED = (
    ({"elaswave": {"enabled": True, "move_layers": "always"}}, (), "lost as a whole"),
    ({"csv_monitor": {"enabled": True, "output_path": "."}}, (), "a monitor of DeepSpeed's"),
    ({}, ("--own-loader",), "whose samples could not be read again"),
    ({"dataloader_drop_last": False}, ("--limit=37",), "the last iteration of an epoch has"),
)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("settings", "options", "words"), sampled(list(REFUSED)))
def test_what_a_pipeline_does_not_carry_is_refused(
    run: Launch, settings: dict[str, object], options: tuple[str, ...], words: str
) -> None:
    refused = run(replace(PP2_DP2, settings=json.dumps(settings), options=options))
    assert refused.returncode == 2, refused.output[-3000:]
    assert words in refused.output and "Traceback" not in refused.output


FORGETFUL = """
from elaswave_plugin.adapters.deepspeed.pipeline.job import PipelineJob
PipelineJob._weight = 1.0
"""


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="3:backward")
@pytest.mark.slow
def test_gradients_with_the_wrong_weight_are_seen(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """Negative control."""
    spec = replace(PP2_DP2, stage=1, kills=("1@3:backward",))
    wrong = run(replace(spec, sabotage=FORGETFUL))
    assert norms(wrong)[4] == pytest.approx(2 * norms(reference(spec))[4], rel=1e-4)
