"""A job that was launched with a reserve grows beyond its launch, and is as one that did not.

Up to the boundary where somebody joins every bit is that of a job without a reserve; from there on
the global batch is the same, in smaller shares, and its sums are made in another order.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import BITS_16_BOUND, FP32_BOUND, EngineSpec, check_recovered, rates
from tests.deepspeed.test_join import EPOCHS, entered, files_of, seen_by, sizes
from tests.deepspeed.test_pipeline import PP2_DP2, norms
from tests.deepspeed.test_save import SAVING
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.faults.test_join import last_ranks
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

GROWS_AT = 4
# An iteration has eight samples: so many workers at most. An epoch has eight of them.
GROWS = EngineSpec(
    steps=10,
    accumulation=1,
    options=("--limit=64",),
    launcher=("--reserve=1",),
    joiners=1,
    changes=(f"+4@{GROWS_AT}",),
)


def check_grown(run: Outcome, reference: Outcome) -> None:
    """The same to the boundary; after it the same losses, in sums of another order."""
    check_survived(run)
    (joined,) = {e["restored_step"] for e in run.events("recovered") if e["newcomers"]}
    # Nobody's work is thrown away.
    assert joined == GROWS_AT
    mine, plain = run.trace(), reference.trace()
    assert [mine[step] for step in range(GROWS_AT)] == [plain[step] for step in range(GROWS_AT)]
    # Negative control: the sums are really made in another order.
    assert mine != plain
    assert isinstance(run.spec, EngineSpec)
    bound = BITS_16_BOUND if run.spec.bf16 else FP32_BOUND
    assert max_relative_difference(run, reference) <= bound
    assert rates(run) == rates(reference)


@proves(Kind.JOIN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "bf16"),
    sampled([(stage, bf16) for bf16 in (False, True) for stage in range(4)]),
)
def test_a_fifth_worker_joins_an_engine_of_four(
    run: Launch, reference: Launch, stage: int, bf16: bool
) -> None:
    spec = replace(GROWS, stage=stage, bf16=bf16)
    grown = run(spec)
    check_grown(grown, reference(spec))
    assert entered(grown) == [(4, 1, GROWS_AT)]
    assert sizes(grown) == [4, 5] and last_ranks(grown) == [0, 1, 2, 3, 4]
    # The newcomer has its part of every step's samples from there on, and there is no gap in them.
    for step in range(10):
        lines = [line for line in grown.files.ledger if line["step"] == step]
        shares = sorted((line["slot"], len(line["samples"])) for line in lines)
        assert shares == [*enumerate([2, 2, 2, 2] if step < GROWS_AT else [2, 2, 2, 1, 1])]


def without(run: Outcome, slot: int) -> EngineSpec:
    """The run in which a worker leaves as planned, before the step to which its loss led back."""
    assert isinstance(run.spec, EngineSpec)
    (step,) = {e["restored_step"] for e in run.events("recovered") if not e["newcomers"]}
    return replace(run.spec, kills=(), changes=(*run.spec.changes, f"{slot}@{step}"))


# Sixteen samples in two iterations a step.
TWO_ITERATIONS = replace(GROWS, global_batch=16, accumulation=2, options=("--limit=128",))


def drawn() -> list[tuple[int, str, bool]]:
    """Every stage: who came beyond the launch is lost, and one of the launch, each in a phase."""
    draw = random.Random(20261123)
    return [
        (stage, f"{victim}@7:{draw.choice(STEP_PHASES)}", draw.random() < 0.5)
        for stage in range(4)
        for victim in ("4.1", str(draw.randrange(4)))
    ]


@proves(Kind.JOIN_LOSS, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "kill", "bf16"), sampled(drawn()))
def test_a_worker_of_a_grown_engine_is_lost(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, bf16: bool
) -> None:
    """4 -> 5 -> 4, as where it leaves as planned."""
    spec, slot = replace(TWO_ITERATIONS, stage=stage, bf16=bf16, kills=(kill,)), int(kill[0])
    killed = run(spec)
    check_recovered(killed, twin=twin(without(killed, slot)), reference=reference(spec))
    assert sizes(killed) == [4, 5, 4]
    assert sorted(last_ranks(killed)) == [one for one in range(5) if one != slot]


@proves(Kind.JOIN_LOSS, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "slot"), [(0, 3), (1, 0), (2, 2), (3, 1)])
def test_a_worker_beyond_the_launch_takes_the_place_of_a_lost_one(
    run: Launch, twin: Twin, reference: Launch, stage: int, slot: int
) -> None:
    """4 -> 3 -> 4: as many as at the launch, and others."""
    spec = replace(GROWS, stage=stage, kills=(f"{slot}@2:backward",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert sizes(killed) == [4, 3, 4]
    assert last_ranks(killed) == [one for one in range(5) if one != slot]


@proves(Kind.NEWCOMER, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "death"), [(0, "agree"), (1, "startup"), (2, "verify"), (3, "move")]
)
def test_a_newcomer_beyond_the_launch_dies_on_its_way_in(
    run: Launch, twin: Twin, reference: Launch, stage: int, death: str
) -> None:
    spec = replace(GROWS, stage=stage, respawn=5, kills=(f"4.1@0:{death}",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed)[-1] == (4, 2, GROWS_AT)
    assert last_ranks(killed) == [0, 1, 2, 3, 4]


@proves(Kind.JOIN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_two_nodes_double(run: Launch, reference: Launch, stage: int) -> None:
    """Two nodes of one worker each, and a third one with two."""
    spec = replace(
        GROWS,
        stage=stage,
        nproc=2,
        nodes=2,
        launcher=("--reserve=2",),
        joiners=2,
        changes=(f"+2@{GROWS_AT}", f"+3@{GROWS_AT}"),
    )
    grown = run(spec)
    check_grown(grown, reference(replace(spec, nodes=1)))
    assert sorted(entered(grown)) == [(2, 1, GROWS_AT), (3, 1, GROWS_AT)]
    assert last_ranks(grown) == [0, 1, 2, 3]


@proves(Kind.JOIN, Promise.WHOLE)
@pytest.mark.parametrize("stage", sampled([2, 3]))
def test_a_loop_over_epochs_grows_and_five_write_the_checkpoints_from_there_on(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    """Epochs that the others have behind them are empty in the script of who joins."""
    spec = replace(
        GROWS,
        script=EPOCHS,
        stage=stage,
        steps=12,
        dump="last",
        changes=("+4@7",),  # epochs 0 and 1 are over, 2 is not
        options=(f"--save={tmp_path}",),
    )
    grown = run(spec)
    check_survived(grown)
    assert [files_of(tmp_path, f"epoch{epoch}") for epoch in range(4)] == [4, 4, 5, 5]
    seen = seen_by(grown)
    (pid,) = [e["pid"] for e in grown.events("worker_started") if e["slot"] == 4]
    newcomer, others = seen.pop(pid), [*seen.values()]
    assert len(others) == 4
    assert [newcomer[epoch][0] for epoch in range(4)] == [0, 0, 2, 3]
    for epoch in (2, 3):
        # The mean of the evaluation, and the steps of the engine.
        assert {(one[epoch][1], one[epoch][3]) for one in (newcomer, *others)} == {
            (newcomer[epoch][1], 3 * (epoch + 1))
        }


@proves(Kind.JOIN, Promise.WHOLE)
@pytest.mark.slow
def test_who_joins_loads_what_the_job_had_loaded(run: Launch, tmp_path: Path) -> None:
    whole = '{"dataloader_drop_last": true}'
    plain = replace(
        GROWS, stage=3, steps=6, dump="never", script=SAVING, settings=whole, changes=("+4@4",)
    )
    first = run(replace(plain, launcher=(), joiners=0, changes=(), options=(f"--save={tmp_path}",)))
    assert (tmp_path / "latest").read_text() == "global_step6", first.output
    second = run(replace(plain, options=(f"--save={tmp_path}", f"--load={tmp_path}")))
    check_survived(second)
    assert entered(second) == [(4, 1, 4)]
    assert (tmp_path / "latest").read_text() == "global_step12"
    assert files_of(tmp_path, "loaded") == 4 and files_of(tmp_path, "global_step12") == 5


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_reserve_with_too_little_to_share_is_refused(run: Launch) -> None:
    """An iteration of four samples: the micro-batches of two iterations have one each."""
    refused = run(replace(GROWS, accumulation=2, joiners=0, changes=(), dump="never"))
    assert refused.returncode == 2
    assert "4 workers and a --reserve of 1 share iterations of which the smallest" in refused.output
    assert "has 4 samples, wanted one for each worker" in refused.output
    assert "Traceback" not in refused.output and not refused.orphans


# Micro-batches of two samples, four a pipeline; another pipeline of two stages joins.
PIPELINES = replace(
    PP2_DP2,
    steps=9,
    launcher=("--reserve=2",),
    joiners=2,
    changes=(f"+4@{GROWS_AT}", f"+5@{GROWS_AT}"),
)


@proves(Kind.JOIN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "bf16", "option"),
    [(1, False, "--tied"), (0, False, "--counted"), (1, True, "--frozen")],
)
def test_a_third_pipeline_joins_two(
    run: Launch, reference: Launch, stage: int, bf16: bool, option: str
) -> None:
    spec = replace(PIPELINES, stage=stage, bf16=bf16, options=(option,))
    grown = run(spec)
    check_grown(grown, reference(spec))
    assert sorted(entered(grown)) == [(4, 1, GROWS_AT), (5, 1, GROWS_AT)]
    assert last_ranks(grown) == [0, 1, 2, 3, 4, 5]
    bound = 2e-2 if bf16 else 1e-5
    wanted = norms(reference(spec))
    assert norms(grown) == {step: pytest.approx(norm, rel=bound) for step, norm in wanted.items()}
    for step in range(GROWS_AT, 9):
        lines = [line for line in grown.files.ledger if line["step"] == step]
        assert sorted(line["k"] for line in lines) == [*range(8)]
        counts = Counter(line["slot"] for line in lines)
        assert counts == {0: 3, 1: 3, 4: 2}


@proves(Kind.JOIN_LOSS, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kill"), [(1, "4.1@7:backward"), (0, "1@7:forward")])
def test_a_worker_of_grown_pipelines_is_lost(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    """Three pipelines become two, as where it leaves as planned."""
    spec, slot = replace(PIPELINES, stage=stage, kills=(kill,)), int(kill[0])
    killed = run(spec)
    check_recovered(killed, twin=twin(without(killed, slot)), reference=reference(spec))
    assert sizes(killed)[-2:] == [6, 5]
