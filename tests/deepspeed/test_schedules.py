"""Schedules that change more than the learning rate, and clipping, when a step is rolled back."""

import json

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

ONE_CYCLE = {
    "type": "OneCycle",
    # The momentum goes round as well, in the betas of the groups.
    "params": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-3,
        "cycle_first_step_size": 3,
        "decay_step_size": 2,
        "decay_lr_rate": 0.1,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.95,
        "decay_mom_rate": 0.05,
    },
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 8, "warmup_max_lr": 1e-3, "warmup_num_steps": 2},
}
COSINE = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 8, "warmup_num_steps": 2, "cos_min_ratio": 0.1},
}


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "clipping", "schedule"),
    sampled(
        [
            (1, "0@3:snapshot", 0.05, ONE_CYCLE),
            (2, "2@3:snapshot", 0.0, DECAY),
            (3, "3@2:snapshot", 0.05, COSINE),
            (0, "1@4:snapshot", 0.0, ONE_CYCLE),
        ]
    ),
    ids=["zero1-clipped-one-cycle", "zero2-decay", "zero3-clipped-cosine", "zero0-one-cycle"],
)
def test_schedules_and_clipping_go_on_where_the_step_was(
    run: Launch,
    twin: Twin,
    reference: Launch,
    stage: int,
    kill: str,
    clipping: float,
    schedule: dict[str, object],
) -> None:
    settings = json.dumps({"gradient_clipping": clipping, "scheduler": schedule})
    spec = EngineSpec(stage=stage, steps=8, kills=(kill,), settings=settings)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert len({record["lr"] for record in killed.files.steps}) > 4
    if clipping:
        assert all(record["grad_norm"] > clipping for record in killed.files.steps)
    elif stage:
        assert all(record["grad_norm"] > 0 for record in killed.files.steps)
