"""Any worker, killed in any phase of a step: equal to its planned departure, close to no loss."""

import itertools

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.tiers import sampled

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
# Of the cover, in `make test`: every slot, every phase, every stage in both dtypes.
KEPT = (0, 1, 2, 10, 11, 19, 27)


def cover() -> list[EngineSpec]:
    """Every slot with every phase, and every pair of slot, phase, ZeRO stage and dtype."""
    specs = []
    for slot, (index, phase) in itertools.product(range(4), enumerate(PHASES)):
        stage = 1 + (slot + index) % 3
        specs.append(
            EngineSpec(stage=stage, bf16=bool((slot + stage) % 2), kills=(f"{slot}@3:{phase}",))
        )
    return specs


def name_of(spec: EngineSpec) -> str:
    """As in "zero3-bf16-2at3-backward"."""
    kills = "-".join(kill.replace("@", "at").replace(":", "-") for kill in spec.kills)
    return f"zero{spec.stage}-{'bf16' if spec.bf16 else 'fp32'}-{kills}"


def test_the_cover_has_every_pair() -> None:
    seen = {
        (name, other, getattr(spec, name), getattr(spec, other))
        for spec in cover()
        for name, other in itertools.permutations(("stage", "bf16", "kills"), 2)
    }
    assert len({pair for pair in seen if pair[:2] == ("stage", "bf16")}) == 6
    where = [(spec.kills[0].split("@")[0], spec.kills[0].split(":")[1], spec) for spec in cover()]
    for position, count in ((0, 4), (1, 7)):
        assert len({(one[position], one[2].stage) for one in where}) == 3 * count
        assert len({(one[position], one[2].bf16) for one in where}) == 2 * count
    kept = [where[number] for number in KEPT]
    assert [len({one[position] for one in kept}) for position in (0, 1)] == [4, 7]
    assert len({(one[2].stage, one[2].bf16) for one in kept}) == 6


@pytest.mark.parametrize("spec", sampled(cover(), keep=KEPT), ids=name_of)
def test_kill_in_a_phase_of_a_step_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, spec: EngineSpec
) -> None:
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
