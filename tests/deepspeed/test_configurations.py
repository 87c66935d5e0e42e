"""Keys of a DeepSpeed configuration that change how a step is reduced, measured or compiled."""

import json
from typing import Any

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BF16 = {"bf16": True}
PROFILER = {"flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False}}
# One buffer for the activations of all layers, of which a pass must not leave a part behind.
CONTIGUOUS = {
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 2,
    }
}
CHECKPOINTED = {"script": str(SCRIPTS / "checkpointing.py")}
# Masters, gradients and moments of 16 bits.
LOW = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
ALL_REDUCE = {"zero_optimization": {"stage": 2, "reduce_scatter": False}}
# ZeRO stage, keys, dtype, kill.
CARRIED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (0, {"prescale_gradients": True}, {}, "1@2:backward"),
    (1, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}, {}, "0@3:reduce"),
    # With reduce_scatter DeepSpeed itself refuses these two.
    (2, {"prescale_gradients": True, **ALL_REDUCE}, {}, "2@2:forward"),
    (2, {"gradient_predivide_factor": 4.0, **ALL_REDUCE}, {}, "3@1:snapshot"),
    (0, {"communication_data_type": "fp32"}, BF16, "3@2:backward"),
    (1, {"communication_data_type": "bf16"}, BF16, "1@3:backward"),
    (2, {"communication_data_type": "fp32"}, BF16, "0@2:gather"),
    (3, {"communication_data_type": "fp32"}, BF16, "2@2:backward"),
    # In the step that is profiled, and before it.
    (2, PROFILER, {}, "1@2:backward"),
    (3, PROFILER, {}, "0@1:forward"),
    (1, CONTIGUOUS, CHECKPOINTED, "1@2:forward"),
    (2, CONTIGUOUS, CHECKPOINTED, "0@1:backward"),
    (3, CONTIGUOUS, CHECKPOINTED, "3@2:forward"),
    (1, LOW, BF16, "1@2:backward"),
    (2, LOW, BF16, "0@3:optimizer"),
    (3, LOW, BF16, "2@2:gather"),
    (2, {"compile": {"deepcompile": False}, "wall_clock_breakdown": True}, {}, "2@3:optimizer"),
]


def name_of(value: Any) -> str | None:
    """As in "prescale_gradients"."""
    return "-".join(value) or "fp32" if isinstance(value, dict) else None


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "keys", "dtype", "kill"), sampled(CARRIED), ids=name_of)
def test_a_kill_equals_the_planned_departure(
    run: Launch,
    twin: Twin,
    reference: Launch,
    stage: int,
    keys: dict[str, Any],
    dtype: dict[str, Any],
    kill: str,
) -> None:
    spec = EngineSpec(stage=stage, kills=(kill,), settings=json.dumps(keys), steps=5, **dtype)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
