"""Skipped iterations are steps without an update, and phases are launches of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.faults.harness import Outcome, check_equal
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

SKIPPED = (2, 3)
SKIPS = ("--iterations-to-skip", *map(str, SKIPPED))
SPEC = ScriptSpec(options=(*NO_EVALUATION, *SKIPS))
STAGES = replace(SPEC, nproc=8, options=(*NO_EVALUATION, *SKIPS, *TP2_PP2))


def check_skipped(run: Outcome) -> None:
    """The skipped steps leave the state as it is, and the others do not."""
    states = [run.trace()[step][2] for step in range(run.spec.steps)]
    assert all(states)
    assert [step for step in range(1, run.spec.steps) if states[step] == states[step - 1]] == [
        *SKIPPED
    ]
    assert len(printed(run)) == run.spec.steps - len(SKIPPED)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("spec", "kill"),
    [
        *((SPEC, kill) for kill in ("1@1:optimizer", "2@2:data", "0@3:snapshot", "3@4:forward")),
        *((STAGES, kill) for kill in ("5@2:data", "0@4:backward")),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one.nproc} workers",
)
def test_a_kill_around_a_skipped_step(
    run: Launch, reference: Launch, spec: ScriptSpec, kill: str
) -> None:
    spec = replace(spec, kills=(kill,))
    killed, undisturbed = run(spec), reference(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    check_skipped(undisturbed)


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("enters", [3, 4])
def test_a_worker_comes_back_at_a_skipped_step(run: Launch, reference: Launch, enters: int) -> None:
    spec = replace(SPEC, steps=7, kills=("1@1:backward",), respawn=10, awaits=((enters - 1, 1),))
    back, undisturbed = run(spec), reference(spec)
    check_equal(back, undisturbed)
    assert printed(back) == printed(undisturbed)
    assert [(one["slot"], one["step"]) for one in back.events("entered")] == [(1, enters)]


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
def test_the_losses_are_those_without_the_plugin(
    reference: Launch, script: Path, data: Path, tmp_path: Path
) -> None:
    spec = replace(SPEC, options=(*SPEC.options, *NO_DROPOUT))
    plain = without_plugin(spec, script=script, data=data, folder=tmp_path / "plain")
    check_close(printed(reference(spec)), plain)


def phase(name: str, **more: object) -> ScriptSpec:
    """A launch of the phases, the first of which ends after 3 steps."""
    folder = "{data}/phases-" + name  # no other test saves there
    phases = ("--phase-transition-iterations", "3", "--save", folder)
    options = (*EVALUATION, *phases, "--save-interval", "100", "--load", folder)
    return replace(ScriptSpec(options=options, ramp=6 * (8,)), **more)  # type: ignore[arg-type]


@proves(Kind.KILL, Promise.EQUAL, victim="1 2", moment="1:backward 4:forward")
def test_each_phase_is_a_launch_and_survives_a_kill(run: Launch) -> None:
    undisturbed = [run(phase("whole")) for _ in range(2)]
    killed = [run(phase("killed", kills=(kill,))) for kill in ("1@1:backward", "2@4:forward")]
    for one, other in zip(killed, undisturbed, strict=True):
        assert one.returncode == other.returncode == 0, one.output[-4000:]
        assert len(one.events("fault_fired")) == 1
        assert one.trace() == other.trace()
        assert printed(one) == printed(other)
        assert "exiting program at iteration 3" in one.output or one is killed[1]
    assert [sorted(one.trace()) for one in killed] == [[0, 1, 2], [3, 4, 5]]
