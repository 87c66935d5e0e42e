"""fp16 with a loss scale that adapts, on a CPU of which DeepSpeed is told that it can do it.

DeepSpeed refuses fp16 on a CPU without instructions for it; torch computes in fp16 on any. Here its
accelerator says yes. Which steps overflow follows from the scale, which halves at each one that
does and doubles after two that do not: a scaler whose state was not that of the step would skip
others. Without ZeRO, DeepSpeed 0.19.8 divides the gradients by a scale by which it has multiplied
no loss; no step overflows there, and the scale only grows.
"""

import json
import math
import re
from dataclasses import replace

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.test_pipeline import PP2_DP2
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

ALLOWED = """
import sys
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
type(get_accelerator()).is_fp16_supported = lambda self: True
take = DeepSpeedEngine._take_model_step
def told(self, *args):
    take(self, *args)
    sys.stdout.write(f"after {self.global_steps} scale {self.optimizer.loss_scale:.0f}\\n")
DeepSpeedEngine._take_model_step = told
"""
FP16 = {
    "enabled": True,
    "initial_scale_power": 20,
    "loss_scale_window": 2,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
JOB = EngineSpec(steps=9, settings=json.dumps({"fp16": FP16, "bf16": None}), sabotage=ALLOWED)


def scales(run: Outcome) -> list[int]:
    """The loss scale after each step, as those saw it who completed it."""
    found = re.findall(r"after (\d+) scale (\d+)", run.output)
    last = {int(step): int(scale) for step, scale in found}
    return [last[step] for step in range(1, run.spec.steps + 1)]


def skipped(run: Outcome) -> list[int]:
    """Steps that overflowed; a norm that is infinite says so."""
    norms = {record["step"]: float.fromhex(record["grad_norm_hex"]) for record in run.files.steps}
    return [step for step, norm in sorted(norms.items()) if math.isinf(norm)]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled(
        [
            (stage, kill)
            for stage in (1, 2, 3)
            # Between steps that overflow, in one, and rolling back one.
            for kill in ("0@4:backward", "3@5:reduce", "1@5:snapshot", "2@6:forward")
        ]
    ),
)
def test_steps_that_overflow_before_and_after_a_loss(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    spec = replace(JOB, stage=stage, kills=(kill,))
    killed, whole = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    assert skipped(killed) == skipped(whole)
    assert min(skipped(whole)) < 4 and max(skipped(whole)) >= 5 and len(skipped(whole)) < 6
    assert scales(killed) == scales(whole) and len(set(scales(whole))) > 2


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0@4:backward", "1@5:snapshot"])
def test_the_scale_without_zero_goes_on_where_the_step_was(
    run: Launch, twin: Twin, reference: Launch, kill: str
) -> None:
    spec = replace(JOB, stage=0, kills=(kill,))
    killed, whole = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    assert scales(killed) == scales(whole) and len(set(scales(whole))) > 2


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["3@4:backward", "2@5:snapshot"])
def test_a_pipeline_skips_the_same_steps(
    run: Launch, twin: Twin, reference: Launch, kill: str
) -> None:
    """Also for the worker that looks on: its schedule is that of the others."""
    settings = json.dumps({"fp16": {**FP16, "initial_scale_power": 18}, "bf16": None})
    spec = replace(PP2_DP2, stage=1, steps=9, settings=settings, sabotage=ALLOWED, kills=(kill,))
    killed, whole = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    assert skipped(killed) == skipped(whole)
    assert min(skipped(whole)) < 4 and max(skipped(whole)) >= 5 and len(skipped(whole)) < 6
    assert scales(killed) == scales(whole)
    rates = {step: {r["lr"] for r in killed.files.steps if r["step"] == step} for step in range(9)}
    assert all(len(found) == 1 for found in rates.values())


FORGET_THE_SCALE = """
from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.values.plain import decode, encode
write = DeepSpeedFramework.write_capsule
def forget(self, capsule):
    state = decode(capsule)
    state["loss_scaler"] = {}
    write(self, encode(state))
DeepSpeedFramework.write_capsule = forget
"""


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="5:snapshot")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_scale_that_is_not_carried_is_seen(run: Launch, reference: Launch, stage: int) -> None:
    """Negative control."""
    spec = replace(JOB, stage=stage, kills=("1@5:snapshot",))
    forgetful = run(replace(spec, sabotage=ALLOWED + FORGET_THE_SCALE))
    check_survived(forgetful)
    assert scales(forgetful) != scales(reference(spec))
