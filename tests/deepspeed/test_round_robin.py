"""Round-robin gradients: an order of the state that depends on how many workers cut it.

A job keeps the launch's, and a checkpoint has the one in which DeepSpeed loads it.
"""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.checkpoints import State, parts
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered
from tests.deepspeed.test_pipeline import PP2_DP2, check_pipeline
from tests.faults.harness import check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

MOMENTS = ("exp_avg", "exp_avg_sq")


def spec_of(stage: int, *kills: str, in_turn: bool = True, **changes: Any) -> EngineSpec:
    """A configuration with the setting, or without it."""
    zero = {"stage": stage, "round_robin_gradients": in_turn}
    settings = json.dumps({"zero_optimization": zero})
    return EngineSpec(stage=stage, kills=kills, settings=settings, **changes)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "changes"),
    sampled(
        [
            (0, "1@2:backward", {}),
            (1, "0@3:optimizer", {"bf16": True}),
            (2, "1@2:backward", {}),
            (2, "3@3:reduce", {"bf16": True}),
            (2, "2@3:snapshot", {}),
        ]
    ),
)
def test_a_kill_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, changes: dict[str, Any]
) -> None:
    spec = spec_of(stage, kill, **changes)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
def test_a_lost_worker_comes_back(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = spec_of(2, "1@1:backward", steps=7, respawn=5, changes=("+1@4",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, 4)]


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="3:backward")
def test_a_pipeline_keeps_the_order_of_its_launch(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    settings = spec_of(1).settings
    killed = run(replace(PP2_DP2, stage=1, kills=("1@3:backward",), settings=settings))
    check_pipeline(killed, twin, reference)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="2:backward")
def test_an_order_of_the_survivors_is_seen(run: Launch, twin: Twin, reference: Launch) -> None:
    order = "elaswave_plugin.adapters.deepspeed.zero.zero12_round_robin"
    sabotage = f"from {order} import RoundRobin; RoundRobin.keep = lambda self: None"
    spec = spec_of(2, "1@2:backward")
    broken = run(spec_of(2, "1@2:backward", sabotage=sabotage))
    check_survived(broken)
    with pytest.raises(AssertionError):
        check_recovered(broken, twin=twin(spec), reference=reference(spec))


def state_of(folder: Path) -> tuple[list[str], State]:
    """Return the order of a checkpoint's parameters, and its masters and moments by their names."""
    files = parts(folder)
    (shapes,) = files["mp_rank_00_model_states.pt"]["param_shapes"]
    written = [
        files[name]["optimizer_state_dict"] for name in sorted(files) if "optim_states" in name
    ]
    flat = {"fp32": torch.cat([one["single_partition_of_fp32_groups"][0] for one in written])}
    for kind in MOMENTS:
        flat[kind] = torch.cat([one["base_optimizer_state"]["state"][0][kind] for one in written])
    state, start = {}, 0
    for name, shape in shapes.items():
        for kind, values in flat.items():
            state[f"{name}/{kind}"] = values[start : start + shape.numel()]
        start += shape.numel()
    return [*shapes], state


def in_turn(names: list[str], width: int) -> list[str]:
    """Return the order in which so many workers are dealt the parameters."""
    return [name for first in range(width) for name in names[first::width]]


@proves(Kind.KILL, Promise.WHOLE, victim="2", moment="3:backward")
@pytest.mark.parametrize("stage", sampled([1, 2]))
def test_a_checkpoint_has_the_order_of_its_writers(run: Launch, tmp_path: Path, stage: int) -> None:
    """As the run without the setting has written it, parameter by parameter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as converted

    folders = {}
    for kind in (True, False):
        folders[kind] = tmp_path / str(kind)
        folders[kind].mkdir()
        options = (f"--save={folders[kind]}",)
        script = str(SCRIPTS / "saving.py")
        spec = spec_of(stage, "2@3:backward", in_turn=kind, script=script, options=options)
        check_survived(run(spec))
    for tag, width in (("global_step2", 4), ("global_step6", 3)):
        (order, state), (plain, wanted) = (state_of(folders[kind] / tag) for kind in (True, False))
        assert order == in_turn(plain, width) != plain
        assert state.keys() == wanted.keys() and len(state) > 3 * len(MOMENTS)
        for name, values in state.items():
            torch.testing.assert_close(values, wanted[name], rtol=1e-5, atol=1e-7)
        with contextlib.redirect_stdout(io.StringIO()):
            weights = converted(str(folders[True]), tag=tag)
        module = parts(folders[True] / tag)["mp_rank_00_model_states.pt"]["module"]
        assert all(torch.equal(weights[name], values) for name, values in module.items())
