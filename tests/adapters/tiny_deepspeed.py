"""A tiny model behind a real DeepSpeed engine, of any ZeRO stage, one a worker of this process."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, Placement
from elaswave_plugin.core.step.dataflow import Shares, share
from tests.adapters.one_process import OneProcess, Seat
from tests.adapters.verbs import Change, drawn, fill


@dataclass(frozen=True)
class Kind:
    """A ZeRO stage and its settings."""

    stage: int
    bf16: bool = False
    round_robin: bool = False
    groups: int = 1

    def __str__(self) -> str:
        more = "-round robin" if self.round_robin else ""
        several = f"-{self.groups} groups" if self.groups > 1 else ""
        return f"zero{self.stage}-{'bf16' if self.bf16 else 'fp32'}{more}{several}"

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
            "bf16": {"enabled": self.bf16},
            "zero_optimization": {
                "stage": self.stage,
                "round_robin_gradients": self.round_robin,
                # One of the parameters stays whole, the others are cut.
                "stage3_param_persistence_threshold": 8,
                # By default an engine maps gigabytes, and a process that has so many forks no more.
                "reduce_bucket_size": 10_000,
                "stage3_prefetch_bucket_size": 10_000,
                "allgather_bucket_size": 10_000,
            },
        }


KINDS = (
    Kind(0),
    Kind(0, bf16=True),
    Kind(1),
    Kind(1, bf16=True, round_robin=True, groups=2),
    Kind(2, groups=2),
    Kind(2, bf16=True),
    Kind(3),
    Kind(3, bf16=True, groups=2),
)


def in_one_process(patch: pytest.MonkeyPatch) -> Iterator[OneProcess]:
    """The place of workers that DeepSpeed runs in, with the records of an elastic job."""
    patch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    from elaswave_plugin.adapters.deepspeed.compat.patches import deepspeed_patches, launch_patches

    sets = launch_patches(), deepspeed_patches()
    for one in sets:
        one.apply()
    place = OneProcess(patch, [comm, groups])
    # ZeRO-3 does so in its constructor, through all that pytest has.
    patch.setattr(gc, "collect", lambda *generation: 0)
    yield place
    place.close()
    for one in reversed(sets):
        one.undo()


def _model() -> torch.nn.Module:
    """Parameters whose sizes no width divides; the last bias stays whole with ZeRO-3."""
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 5), torch.nn.Linear(5, 13), torch.nn.Linear(13, 3)
    )


def start(one: OneProcess, width: int, kind: Kind) -> Change:
    """Begin a job of this kind, as after six steps."""
    import deepspeed

    from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework

    def build(seat: Seat) -> Any:
        model = _model()
        params = [*model.parameters()]
        groups = [{"params": params[n :: kind.groups]} for n in range(kind.groups)]
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups, config=kind.config, dist_init_required=False
        )
        framework = DeepSpeedFramework(engine)
        framework.begin()
        return framework

    one.start(width, build)

    def begin(seat: Seat) -> None:
        fill(seat)
        for _ in range(6):
            take_step(seat)

    ranks = tuple(range(width))
    one.each(ranks, begin)
    first = one.seats[0].framework
    placement = FlatPlacement(launch_slots=ranks, ranks=ranks, buckets=first.bucket_lengths())

    def flow(now: Placement) -> Shares:
        return share(num_samples=2 * width, **now.dealt_over)

    return Change(
        one,
        placement,
        alignment=first.shard_alignment,
        flow=flow,
        weights=weights,
        steps=steps_of,
        step=take_step,
    )


def take_step(seat: Seat) -> None:
    """Count one step more in what the capsule carries."""
    from elaswave_plugin.adapters.deepspeed.zero import zero_state

    engine = seat.framework._engine
    count = zero_state.applied_steps(engine.basic_optimizer) + 1
    zero_state.set_applied_steps(engine.basic_optimizer, count)
    engine.global_steps += 1
    engine.lr_scheduler.step()


def steps_of(seat: Seat) -> tuple[int, int, float]:
    """Return what a capsule brings: steps of Adam and of the engine, the learning rate."""
    from elaswave_plugin.adapters.deepspeed.zero import zero_state

    engine = seat.framework._engine
    sizes = engine.dp_world_size, engine.world_size, engine._config.world_size
    assert set(sizes) == {torch.distributed.get_world_size()}, f"the engine has sizes {sizes}"
    applied = {int(state["step"]) for state in engine.basic_optimizer.state.values() if state}
    assert applied == {zero_state.applied_steps(engine.basic_optimizer)}
    return applied.pop(), engine.global_steps, seat.framework.learning_rate()


def weights(seat: Seat) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The weights that this worker has: all of them, with ZeRO-3 its parts and what stays whole."""
    rank = torch.distributed.get_rank()
    for name, param in seat.framework._engine.module.named_parameters():
        whole = drawn(name, "master", getattr(param, "ds_numel", param.numel())).to(param.dtype)
        if not hasattr(param, "ds_tensor"):
            yield name, param.detach().flatten(), whole
            continue
        part = param.ds_tensor.detach()
        wanted = whole[rank * len(part) : (rank + 1) * len(part)]
        yield f"{name} (part)", part[: len(wanted)], wanted
        if param.ds_persist:
            yield name, param.detach().flatten(), whole
