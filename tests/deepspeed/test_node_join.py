"""A node is lost with all that it holds, and `--join` brings another one into the engine's job."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.test_join import BACK, STEPS, entered, sizes
from tests.faults.harness import Zygote
from tests.faults.test_node_join import lose_and_join, lose_with_standby
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


@proves(Kind.NODE_RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "slot", "standby"),
    sampled([(1, 2, False), (2, 0, False), (3, 1, False), (2, 3, True)]),
)
def test_a_lost_node_of_an_engine_comes_back(
    zygote: Zygote,
    tmp_path: Path,
    twin: Twin,
    reference: Launch,
    stage: int,
    slot: int,
    standby: bool,
) -> None:
    spec = EngineSpec(
        stage=stage, steps=STEPS, nodes=4, respawn=5, changes=(f"+{slot}@{BACK}",), dump="last"
    )
    where = {"zygote": zygote, "data": tmp_path, "directory": tmp_path / "run"}
    run = (
        lose_with_standby(spec, slot, **where) if standby else lose_and_join(spec, [slot], **where)
    )
    lost_before = min(event["restored_step"] for event in run.events("recovered"))
    undisturbed = replace(spec, nodes=1)
    leaving = replace(undisturbed, kills=(f"{slot}@{lost_before}",))
    check_recovered(run, twin=twin(leaving), reference=reference(undisturbed))
    assert entered(run) == [(slot, 1, BACK)]
    assert sizes(run) == [4, 3, 4]
