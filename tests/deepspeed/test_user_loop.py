"""Loops that a script owns, without a line of the plugin in it: what they see after a loss."""

import json

import pytest

from elaswave_plugin.observer.observer import losses_of
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OWN_OPTIMIZER = {
    "script": str(SCRIPTS / "own_optimizer.py"),
    "settings": json.dumps({"optimizer": None, "scheduler": None}),
}


def reports(run: Outcome) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(run.directory.glob("handles-*.json"))]


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="3:backward")
@pytest.mark.parametrize("stage", sampled([0, 1, 2, 3]))
def test_handles_counters_and_schedules_of_the_script_stay_valid(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    spec = EngineSpec(stage=stage, kills=("2@3:backward",), **OWN_OPTIMIZER)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert len(reports(killed)) == 3
    for report in reports(killed):
        assert report["same_objects"] and report["always_trained"]
        assert report["global_steps"] == report["scheduler"] == spec.steps
        assert report["global_samples"] == spec.steps * spec.global_batch
        assert report["lr"] == [rate * (1 / (1 + spec.steps)) for rate in (1e-2, 1e-3)]
        # The interrupted step is counted once, with batches more than it needs; none on a worker
        # that had not begun it: without ZeRO nobody meets anybody before the last backward.
        steps = [step for step, _, _ in report["seen"]]  # type: ignore[attr-defined]
        assert steps == sorted(steps)
        assert 2 * spec.steps + (stage == 3) <= len(steps) <= 2 * spec.steps + 2


@proves(Kind.KILLS, Promise.PLANNED, victim="0 2 3", moment="1:backward 2:forward 4:reduce")
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
def test_four_workers_become_one(run: Launch, twin: Twin, reference: Launch, stage: int) -> None:
    spec = EngineSpec(stage=stage, kills=("0@1:backward", "2@2:forward", "3@4:reduce"))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    said = [line for line in killed.output.splitlines() if "from now on" in line]
    heirs = [line for line in said if "; worker 1 is rank 0 from now on" in line]
    assert len(heirs) == 1 and "recovered: " in heirs[0]
    assert "the numbers of " not in killed.output, "none is the script's own"
    sizes = {
        (line["epoch"], line["slot"]): len(line["samples"])
        for line in killed.files.ledger
        if line["step"] in (0, 5)
    }
    assert set(sizes.values()) == {1, 4}


@proves(Kind.IN_RECOVERY, Promise.PLANNED, victim="2")
@pytest.mark.parametrize("stage", sampled([1, 3]))
@pytest.mark.parametrize(
    "phase", sampled(["detect", "agree", "edit", "move", "rebind", "verify", "replay"])
)
def test_second_kill_during_a_recovery(
    run: Launch, twin: Twin, reference: Launch, stage: int, phase: str
) -> None:
    spec = EngineSpec(stage=stage, kills=("2@3:backward", f"1@3:{phase}"))
    killed = run(spec)
    check_survived(killed)
    # Its twin loses both at once, and so is at the same width when it redoes the step.
    both = EngineSpec(stage=stage, kills=("2@3:backward", "1@3:backward"))
    assert killed.trace() == twin(both).trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="0:backward")
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_kill_in_the_first_step(run: Launch, twin: Twin, reference: Launch, stage: int) -> None:
    spec = EngineSpec(stage=stage, kills=("1@0:backward",))
    check_recovered(killed := run(spec), twin=twin(killed), reference=reference(spec))


@proves(Kind.KILL, Promise.PLANNED, victim="3", moment="4:backward")
@pytest.mark.parametrize("accumulation", sampled([1, 2]))
def test_uneven_shares_and_the_end_of_an_epoch(
    run: Launch, twin: Twin, reference: Launch, accumulation: int
) -> None:
    """Eight samples a step or sixteen, three workers, epochs of five iterations, the last short."""
    spec = EngineSpec(
        stage=2,
        steps=9,
        global_batch=8 * accumulation,
        accumulation=accumulation,
        options=("--limit=37",),
        kills=("3@4:backward",),
    )
    killed = run(spec)
    check_survived_with_short_batches(killed)
    check_survived_with_short_batches(twin(killed))
    assert killed.trace() == twin(killed).trace()
    assert max_relative_difference(killed, reference(spec)) <= 1e-6
    lines = [line for line in killed.files.ledger if line["epoch"] > 1]
    assert {len(line["samples"]) for line in lines} >= {2, 3}


def check_survived_with_short_batches(run: Outcome) -> None:
    """As the ledger of an epoch with short batches has fewer samples than steps times batch."""
    assert run.returncode == 0, run.output[-4000:]
    assert not run.orphans
    assert len(run.trace()) == run.spec.steps


@proves(Kind.KILL, Promise.PLANNED, victim="0", moment="3:optimizer")
def test_the_lines_of_the_page_on_loops_are_right_after_a_loss(run: Launch) -> None:
    """Each beside the one that it takes the place of, which a loss makes wrong."""
    script = str(SCRIPTS / "own_loop.py")
    killed = run(EngineSpec(script=script, kills=("0@3:optimizer",)))
    check_survived(killed)
    found = [json.loads(path.read_text()) for path in sorted(killed.directory.glob("own-loop-*"))]
    assert [one["rank"] for one in found] == [0, 1, 2]
    # Rank 0 of the launch is gone: a rank that was read before the loop is nobody's.
    assert sorted(one["first_rank"] for one in found) == [1, 2, 3]
    losses = list(losses_of(killed.files).values())
    for one in found:
        means, plain = map(list, zip(*one["means"], strict=True))
        assert means == pytest.approx(losses, rel=1e-6)
        assert plain[:3] == pytest.approx(losses[:3], rel=1e-6)
        assert all(abs(a - b) > 1e-4 * b for a, b in zip(plain[3:], losses[3:], strict=True))
        assert [samples for _, samples in one["evaluations"]] == [12.0] * 3
    # Once in the interrupted step, and again in the one that is made.
    assert max(one["boundaries"].count(3) for one in found) == 2
    assert found[0]["steps"][-3:] == [3, 4, 5], "printed by rank 0, whoever that is"
