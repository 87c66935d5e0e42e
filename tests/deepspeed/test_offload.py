"""Optimizer state and parameters in host memory, as offload has them: sealed and read back there.

What DeepSpeedCPUAdam compiles at its first use is played by torch, as in test_adams.py.
"""

import json
import re
from typing import Any

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_adams import PLAYED
from tests.deepspeed.test_join import entered
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

LORA = str(SCRIPTS / "lora.py")
# Masters and gradients of 16 bits; moments stay in float32.
LOW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
PARAMETERS = {"offload_param": {"device": "cpu", "pin_memory": True}}


def spec_of(stage: int, *kills: str, **changes: Any) -> EngineSpec:
    """A configuration that offloads the optimizer, which DeepSpeed then makes itself.

    ``zero``: more keys of ZeRO.
    """
    zero = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 100,
        **changes.pop("zero", {}),
    }
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    settings = {"zero_optimization": zero, "optimizer": adam, **changes.pop("settings", {})}
    return EngineSpec(
        stage=stage, kills=kills, settings=json.dumps(settings), sabotage=PLAYED, **changes
    )


def check_offloaded(run: Outcome, *, fewest: int | None = None) -> None:
    """DeepSpeedCPUAdam has made every update of every survivor, and ``fewest`` of a newcomer."""
    counts = [int(count) for count in re.findall(r"updates (\d+)\.", run.output)]
    assert counts and min(counts) >= (run.spec.steps if fewest is None else fewest)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "changes"),
    sampled(
        [
            (1, "1@2:backward", {}),
            (1, "0@3:optimizer", {"bf16": True}),
            (2, "3@2:forward", {"bf16": True}),
            (2, "2@3:snapshot", {}),
            (2, "1@1:reduce", {"script": LORA}),
            (3, "0@2:backward", {}),
            (3, "2@3:gather", {"bf16": True}),
            (3, "1@2:optimizer", {"script": LORA}),
            (3, "1@2:backward", {"zero": PARAMETERS}),
            (3, "3@3:gather", {"zero": {"cpu_offload_param": True}, "bf16": True}),
            (3, "0@2:forward", {"zero": PARAMETERS, "script": LORA}),
            (2, "1@3:backward", {"settings": LOW, "bf16": True}),
            (3, "2@2:gather", {"settings": LOW, "bf16": True}),
            (3, "2@2:optimizer", {"zero": {**PARAMETERS, "sub_group_size": 10_000}}),
        ]
    ),
)
def test_a_kill_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, changes: dict[str, Any]
) -> None:
    spec = spec_of(stage, kill, **changes)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_offloaded(killed)


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
def test_two_losses_in_one_run(run: Launch, twin: Twin, reference: Launch, stage: int) -> None:
    spec = spec_of(stage, "0@1:backward", "3@3:forward")
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_offloaded(killed)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
@pytest.mark.parametrize(("stage", "zero"), sampled([(2, {}), (3, {}), (3, PARAMETERS)]), ids=str)
def test_a_lost_worker_comes_back(
    run: Launch, twin: Twin, reference: Launch, stage: int, zero: dict[str, Any]
) -> None:
    spec = spec_of(stage, "1@1:backward", zero=zero, steps=7, respawn=5, changes=("+1@4",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, 4)]
    check_offloaded(killed, fewest=3)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:forward")
def test_a_trainer_with_adapters_offloads_parameters(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """With its own AdamW, in whose place Accelerate makes DeepSpeed's."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.deepspeed.hf_runs import AUTO, TRAINER, check_tapes

    more: dict[str, Any] = {"settings": AUTO, "script": TRAINER, "options": ("--lora",)}
    spec = spec_of(3, "1@2:forward", zero=PARAMETERS, **more)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3)
    check_offloaded(killed)
