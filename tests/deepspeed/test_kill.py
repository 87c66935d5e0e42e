"""Any worker, killed in any phase of a step: equal to its planned departure, close to no loss."""

import itertools

import pytest

from elaswave_plugin.config import STEP_PHASES, parse_kill
from tests.convoys import Convoy, convoys
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.proofs import Kind, Promise, proves

# ZeRO stage, bf16.
KINDS = tuple(itertools.product((1, 2, 3), (False, True)))
SLOTS = range(4)


def cover() -> list[EngineSpec]:
    """Every pair of kind, slot and phase, in as few cases as there are kinds and phases."""
    return [
        EngineSpec(
            steps=6, stage=stage, bf16=bf16, kills=(f"{(kind + index) % len(SLOTS)}@2:{phase}",)
        )
        for (kind, (stage, bf16)), (index, phase) in itertools.product(
            enumerate(KINDS), enumerate(STEP_PHASES)
        )
    ]


def name_of(spec: EngineSpec) -> str:
    """As in "zero3-bf16-2at3-backward"."""
    kills = "-".join(kill.replace("@", "at").replace(":", "-") for kill in spec.kills)
    return f"zero{spec.stage}-{'bf16' if spec.bf16 else 'fp32'}-{kills}"


def test_the_cover_has_every_pair() -> None:
    kills = [(spec.stage, spec.bf16, parse_kill(spec.kills[0])) for spec in cover()]
    axes = [
        [(stage, bf16) for stage, bf16, _ in kills],
        [kill.slot for _, _, kill in kills],
        [kill.phase for _, _, kill in kills],
    ]
    for (one, values), (other, others) in itertools.combinations(
        zip(axes, (KINDS, SLOTS, STEP_PHASES), strict=True), 2
    ):
        assert set(zip(one, other, strict=True)) == set(itertools.product(values, others))


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("spec", convoys(cover(), lambda spec: spec), ids=name_of)
def test_kill_in_a_phase_of_a_step_equals_the_planned_departure(
    convoy: Convoy, twin: Twin, reference: Launch, spec: EngineSpec
) -> None:
    planned, undisturbed = twin(convoy.planned), reference(convoy.run.spec)
    convoy.check(
        planned.trace(),
        lambda: check_recovered(convoy.run, twin=planned, reference=undisturbed),
    )
