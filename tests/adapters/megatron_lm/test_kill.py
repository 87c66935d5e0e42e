"""A worker of an unmodified pretrain_gpt.py is killed: it goes on as if nothing had happened."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from elaswave_plugin.config import STEP_PHASES
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import TP2_PP2, ScriptSpec, needs_repository, printed
from tests.convoys import Convoy, convoys, verdicts
from tests.faults.harness import Outcome, check_equal, check_survived
from tests.faults.test_negative_controls import WITH_FEW
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

pytestmark = needs_repository

TP2_PP2_DP2 = ScriptSpec(nproc=8, steps=5, options=(*ScriptSpec().options, *TP2_PP2))

FULL_RECOMPUTATION = ("--recompute-granularity", "full", "--recompute-method", "uniform")


def check_same(run: Launch, reference: Launch, spec: ScriptSpec, *, alive: int) -> None:
    """The kills fired, nobody else was lost, and every number is that of the undisturbed run."""
    check_undisturbed(run(spec), reference(spec), alive=alive)


def check_undisturbed(killed: Outcome, undisturbed: Outcome, *, alive: int) -> None:
    """Two runs have the same numbers, also those that are printed; so many workers are left."""
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert len(killed.events("view_committed")[-1]["ranks"]) == alive
    assert "Traceback" not in killed.output


def check_convoy(convoy: Convoy, reference: Launch) -> None:
    """The own kill of a case changed nothing."""
    run = convoy.run
    undisturbed = reference(replace(run.spec, script=ScriptSpec().script, sabotage=""))
    alive = run.spec.nproc - len(run.spec.kills)
    convoy.check(undisturbed.trace(), lambda: check_undisturbed(run, undisturbed, alive=alive))


def spec_of(kill: str) -> ScriptSpec:
    """The data-parallel job with one loss."""
    return ScriptSpec(kills=(kill,))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill",
    convoys(
        [f"{index % 4}@3:{phase}" for index, phase in enumerate(STEP_PHASES)], spec_of, first=2
    ),
    ids=str,
)
def test_any_phase_of_a_data_parallel_job(convoy: Convoy, reference: Launch, kill: str) -> None:
    check_convoy(convoy, reference)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    convoys(
        [f"{slot}@2:{phase}" for slot, phase in itertools.product(range(4), STEP_PHASES[1:3])],
        spec_of,
    ),
)
def test_any_worker_of_a_data_parallel_job(convoy: Convoy, reference: Launch, kill: str) -> None:
    check_convoy(convoy, reference)


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.parametrize("kills", [("1@2:forward", "0@3:data", "3@4:gather")])
def test_the_fault_of_a_convoy_that_breaks_it_is_named(
    run: Launch, reference: Launch, kills: tuple[str, ...]
) -> None:
    broken = run(ScriptSpec(kills=kills, sabotage=WITH_FEW.format(left=2)))
    check_survived(broken)
    found = verdicts(broken, lambda convoy: check_convoy(convoy, reference))
    assert found == ["passes", "fails", "not run"]


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="5:backward")
def test_steps_without_a_seal_are_made_again(run: Launch, reference: Launch) -> None:
    spec = ScriptSpec(steps=8)
    fewer = (*spec.options, "--elaswave-snapshot-interval", "3")
    killed, undisturbed = (
        run(replace(spec, kills=("1@5:backward",), options=fewer)),
        reference(spec),
    )
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert {event["restored_step"] for event in killed.events("recovered")} == {3}


@proves(Kind.KILLS, Promise.EQUAL, victim="0 3 1", moment="0:backward 2:reduce 4:gather")
def test_down_to_one_worker(run: Launch, reference: Launch) -> None:
    kills = ("0@0:backward", "3@2:reduce", "1@4:gather")
    check_same(run, reference, ScriptSpec(kills=kills), alive=1)


def of_groups(kills: Iterable[str]) -> list[Any]:
    """Convoys of workers of two TP groups: as many as there are stages are left."""
    return convoys(
        kills,
        lambda kill: replace(TP2_PP2_DP2, kills=(kill,)),
        most=2,
        victim=lambda kill: kill.slot // 2,
    )


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill",
    of_groups(f"{slot}@2:{('forward', 'backward')[slot % 2]}" for slot in (0, 3, 5, 6)),
)
def test_a_worker_of_tp_pp_dp(convoy: Convoy, reference: Launch, kill: str) -> None:
    check_convoy(convoy, reference)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    of_groups(
        f"{slot}@2:{phase}" for slot, phase in itertools.product(range(8), ("forward", "backward"))
    ),
)
def test_any_worker_of_tp_pp_dp(convoy: Convoy, reference: Launch, kill: str) -> None:
    check_convoy(convoy, reference)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize(
    "more",
    [
        ("--bf16",),
        (*FULL_RECOMPUTATION, "--recompute-num-layers", "1"),
        ("--calculate-per-token-loss",),
        ("--exit-signal-handler",),
        ("--reset-attention-mask", "--eod-mask-loss", "--reset-position-ids"),
    ],
    ids=lambda more: more[-1].strip("-"),
)
def test_settings_of_the_script(run: Launch, reference: Launch, more: tuple[str, ...]) -> None:
    spec = ScriptSpec(options=(*ScriptSpec().options, *more), kills=("1@2:backward",))
    check_same(run, reference, spec, alive=3)


@proves(Kind.KILL, Promise.EQUAL, victim="5", moment="2:backward")
@pytest.mark.parametrize("base", sampled([ScriptSpec(), TP2_PP2_DP2]), ids=["dp", "tp_pp"])
def test_fp16_with_steps_that_overflow(run: Launch, reference: Launch, base: ScriptSpec) -> None:
    """The first steps are skipped, one of them by free workers too, which are the last rank."""
    scale = ("--fp16", "--initial-loss-scale", str(2**32), "--loss-scale-window", "2")
    spec = replace(base, steps=6, options=(*base.options, *scale), kills=("5@2:backward",))
    if base.nproc == 4:
        spec = replace(spec, kills=("1@2:backward",))
    check_same(run, reference, spec, alive=base.nproc - 1)
    skipped = [line for line in printed(reference(spec)) if "skipped iterations:   1" in line]
    assert 3 <= len(skipped) < spec.steps


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
def test_cyclic_order(run: Launch, reference: Launch) -> None:
    """Each replica's samples are shuffled; whoever takes a micro-batch over reads the same ones."""
    options = (*ScriptSpec().options, "--dataloader-type", "cyclic")
    spec = ScriptSpec(options=options, kills=("1@2:backward",))
    killed, undisturbed = run(spec), reference(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    assert killed.trace() == undisturbed.trace()
    assert printed(killed) == printed(undisturbed)
    assert consumed(killed) == consumed(undisturbed)
    assert len(set(consumed(undisturbed).values())) == 6 * 8


def consumed(run: Outcome) -> dict[tuple[int, int], tuple[int, ...]]:
    """The samples of each step and micro-batch, the last time that it was run."""
    return {(one["step"], one["k"]): tuple(one["samples"]) for one in run.files.ledger}


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="2:backward")
def test_interleaved_stages(run: Launch, reference: Launch) -> None:
    options = (
        *ScriptSpec().options,
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    )
    check_same(run, reference, ScriptSpec(options=options, kills=("3@2:backward",)), alive=3)
