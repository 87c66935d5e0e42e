"""The GPT of `examples/train_gpt.py`, tiny, with its real distributed optimizer, in one process.

Of the worker (`recovery/worker.py`), which needs an agent, there is a stand-in: `StandInWorker`.
"""

import runpy
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.planner.layer_times import PassTimes
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, GridPlacement, Placement
from elaswave_plugin.core.step.dataflow import deal
from elaswave_plugin.recovery.stopwatch import Stopwatch
from tests.adapters.one_process import OneProcess, Seat
from tests.adapters.verbs import Change, drawn, fill

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
MICROBATCHES = 24


@dataclass
class StandInWorker:
    """Answers what the adapter asks of a worker: its place, phases, times."""

    slot: int
    placement: Placement
    ranks: tuple[int, ...]
    config: ElasticConfig
    spare_width: int = 0
    reserve: int = 0
    promises_bits: bool = True
    detached: bool = False
    job_constants: dict[str, Any] = field(default_factory=dict)
    groups_at_launch: Any = None
    stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch(PassTimes()))
    member: Any = field(default_factory=lambda: SimpleNamespace(check=lambda: None))
    state: Any = field(default_factory=lambda: SimpleNamespace(begin_update=lambda: None))
    phases: Any = field(
        default_factory=lambda: SimpleNamespace(enter=lambda name: None, announce=lambda name: None)
    )

    def remember(self, **what: Any) -> None:
        """Keep what a newcomer would be told."""
        self.job_constants |= what


@dataclass(frozen=True)
class Kind:
    """Stages and their chunks, and the precision."""

    stages: int = 1
    chunks: int | None = None
    bf16: bool = False
    # Whether what is in place after a seal stays there, or all is read.
    keeps: bool = False

    def __str__(self) -> str:
        chunks = f"-{self.chunks} chunks" if self.chunks else ""
        kept = "-in place" if self.keeps else ""
        return f"pp{self.stages}{chunks}-{'bf16' if self.bf16 else 'fp32'}{kept}"


def in_one_process(patch: pytest.MonkeyPatch) -> Iterator[OneProcess]:
    """The place of workers that Megatron-Core runs in, with the records of an elastic job."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from elaswave_plugin.adapters.megatron import grid
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
    from elaswave_plugin.adapters.patching import PatchSet

    sets = PatchSet([*cpu_patches().records, *elastic_patches(exact=True).records])
    sets.apply()
    # How fast links are decides where layers go, and is measured.
    patch.setattr(grid, "measure_link", lambda: 1e9)
    place = OneProcess(patch, [parallel_state, random])
    yield place
    place.close()
    sets.undo()


def _arguments(example: Mapping[str, Any], kind: Kind) -> Namespace:
    line = "example --data-path=none --num-layers=4 --hidden-size=8 --num-attention-heads=2"
    line += " --seq-length=8 --ddp-bucket-size=700 --num-layers=4"
    line += f" --pipeline-model-parallel-size={kind.stages}"
    line += " --bf16" if kind.bf16 else ""
    line += f" --num-virtual-stages-per-pipeline-rank={kind.chunks}" if kind.chunks else ""
    before, sys.argv = sys.argv, line.split()
    try:
        args: Namespace = example["parse_arguments"]()
    finally:
        sys.argv = before
    return args


class _Job:
    """The workers and grids of one job, beside their frameworks."""

    def __init__(self, width: int, kind: Kind, settings: dict[str, Any]) -> None:
        self._kind, self._settings = kind, settings
        self.ranks = tuple(range(width * kind.stages))
        self._example = runpy.run_path(str(EXAMPLE))
        self._workers: dict[int, StandInWorker] = {}
        self._grids: dict[int, Any] = {}

    def build(self, seat: Seat) -> Any:
        """The model of this worker, as the script and `job.bind` make it."""
        from megatron.core import parallel_state, tensor_parallel

        from elaswave_plugin.adapters.megatron.bound_models import BoundModels
        from elaswave_plugin.adapters.megatron.framework import MegatronFramework
        from elaswave_plugin.adapters.megatron.grid import Grid
        from elaswave_plugin.adapters.megatron.unsupported import check_supported

        kind = self._kind
        parallel_state.initialize_model_parallel(1, kind.stages, kind.chunks)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        flat = FlatPlacement(launch_slots=self.ranks, ranks=self.ranks)
        worker: Any = StandInWorker(seat.slot, flat, self.ranks, ElasticConfig(**self._settings))
        self._workers[seat.slot], worker.groups_at_launch = worker, seat.groups.members
        args = _arguments(self._example, kind)
        chunks = self._example["build_model"](args)
        optimizer, scheduler = self._example["build_optimizer"](args, chunks)
        model = MegatronFramework(
            worker,
            chunks=chunks,
            optimizer=optimizer,
            distributed_optimizer=check_supported(tuple(chunks), optimizer),
            scheduler=scheduler,
            prepare=lambda module: None,
        )
        framework = BoundModels([model])
        placement: Placement
        if kind.stages > 1:
            numbers: Any = {"num_microbatches": MICROBATCHES, "micro_batch_size": 1}
            grid = self._grids[seat.slot] = Grid(worker, model, **numbers, why_whole=None)
            placement = grid.placement
        else:
            placement = replace(flat, buckets=framework.bucket_lengths())
        worker.placement = placement
        framework.take_place(self.flow(placement, seat.slot))
        return framework

    def placement(self) -> Placement:
        """That of the launch."""
        return self._workers[0].placement

    def flow(self, now: Placement, slot: int = 0) -> Any:
        """The work of a step, dealt as the adapter deals it."""
        if self._grids:
            return self._grids[slot].deal(**now.dealt_over)
        return deal(num_microbatches=MICROBATCHES, **now.dealt_over)

    def place(self, seat: Seat, now: Placement, ranks: tuple[int, ...]) -> Placement:
        """Have a worker know its view."""
        worker = self._workers[seat.slot]
        if isinstance(now, GridPlacement):
            now = replace(now, rules=self._grids[seat.slot].placement.rules)
        worker.placement, worker.ranks = now, now.world(ranks)
        return now


def start(one: OneProcess, width: int, kind: Kind, **settings: Any) -> Change:
    """Begin a job of ``width`` replicas of this kind, as after six steps."""
    job = _Job(width, kind, settings)
    one.start(len(job.ranks), job.build)

    def begin(seat: Seat) -> None:
        fill(seat)
        for _ in range(6):
            take_step(seat)

    one.each(job.ranks, begin)
    return Change(
        one,
        job.placement(),
        alignment=one.seats[0].framework.shard_alignment,
        flow=job.flow,
        weights=weights,
        steps=steps_of,
        step=take_step,
        place=job.place,
        keeps=kind.keeps,
    )


def take_step(seat: Seat) -> None:
    """Count one step more in what the capsule carries."""
    model = seat.framework.models[0]
    model._applied_steps += 1
    model.shard.set_applied_steps(model._applied_steps)
    model._scheduler.step(increment=8)


def steps_of(seat: Seat) -> tuple[int, int, float]:
    """Return what a capsule brings: steps of Adam and of the scheduler, the learning rate."""
    model = seat.framework.models[0]
    applied = {int(state["step"]) for state in model.inner_optimizer.state.values()}
    assert applied <= {model._applied_steps}, (
        f"Adam counts {applied}, {model._applied_steps} before"
    )
    return (
        model._applied_steps,
        model._scheduler.num_steps,
        model.inner_optimizer.param_groups[0]["lr"],
    )


def weights(seat: Seat) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """All the weights that this worker has."""
    from elaswave_plugin.adapters.megatron.state.global_names import global_names

    model = seat.framework.models[0]
    for name, param in global_names(model.chunks) if model.is_placed else ():
        yield name, param.detach().flatten(), drawn(name, "master", param.numel()).to(param.dtype)
