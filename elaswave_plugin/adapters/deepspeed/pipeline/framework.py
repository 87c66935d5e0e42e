"""A `PipelineEngine` behind the verbs of ``framework.py``.

A worker without a pipeline keeps its modules and knows nothing: what it needs comes with the
snapshots when it is in one again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.adapters.deepspeed.pipeline.grid import edit_grid
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaPlacement
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.state_dump import NamedPiece
from elaswave_plugin.values.plain import decode


class PipelineFramework(DeepSpeedFramework):
    """The engine of one worker, which has a place in a pipeline or none."""

    def __init__(self, engine: Any, worker: Worker) -> None:
        super().__init__(engine)
        self._worker = worker
        self._counters: dict[str, int] = {}
        self.hides_counters = False
        """Whether the engine shows the script those of a step that the others have behind them."""

    @property
    def placement(self) -> ReplicaPlacement:
        """The present pipelines."""
        assert isinstance(self._worker.placement, ReplicaPlacement)
        return self._worker.placement

    @property
    def is_busy(self) -> bool:
        """True if this worker is in a pipeline."""
        return self.placement.place_of(self._worker.slot) is not None

    def pause(self) -> None:
        """Drop the interrupted step, also what is in the pipe."""
        super().pause()
        engine = self._engine
        engine._force_grad_boundary = False
        for buffers in engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        engine.fwd_outputs = []
        engine.loss = torch.zeros_like(engine.loss, requires_grad=False)
        # Shapes are told again: somebody may have another neighbour.
        engine.reset_activation_shape()

    def rebind(self, plan: RecoveryPlan) -> None:
        """Point what DeepSpeed cached at the new layout: the grid, then what any engine has."""
        engine = self._engine
        engine.__dict__.pop("_save_checkpoint", None)
        if not self.is_busy:
            # It takes part in the barriers of a save, and writes nothing.
            engine.save_zero_checkpoint = engine.save_non_zero_checkpoint = False
            engine._save_checkpoint = _writes_nothing
            return
        ranks = plan.ranks
        edit_grid(
            engine.module,
            [[ranks.index(slot) for slot in replica] for replica in self.placement.replicas],
        )
        assert isinstance(plan.dataflow, Dataflow)
        engine.micro_batches = len(plan.dataflow.microbatches(self._worker.slot))
        engine.is_data_parallel = engine.grid.data_parallel_size > 1
        super().rebind(plan)

    def save(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the engine's ``save_checkpoint``, which writes nothing without a pipeline."""
        if not self.is_busy:
            return native(*args, **kwargs)
        return super().save(native, *args, **kwargs)

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install the masters, where there are any."""
        if self.is_busy:
            super().write_weights(masters)

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install the moments, where there are any."""
        if self.is_busy:
            super().write_moments(moments)

    def write_capsule(self, capsule: bytes) -> None:
        """Install what ``read_capsule`` returned; without a place, what all have alike."""
        if self.is_busy:
            super().write_capsule(capsule)
            return
        state = decode(capsule, "the capsule")
        self._write_progress(state)
        # Some schedulers go on from the rate of the last step. Another stage may have more groups.
        groups = self._inner.param_groups
        for group, values in zip(groups, state["param_groups"], strict=False):
            group["lr"] = values["lr"]

    def _write_progress(self, state: dict[str, Any]) -> None:
        self._counters = state["counters"]
        super()._write_progress({**state, "counters": {}} if self.hides_counters else state)

    def show_counters(self) -> None:
        """The script has come to where the others are: the engine has the job's counters."""
        if self.hides_counters:
            self.hides_counters = False
            for name, value in self._counters.items():
                setattr(self._engine, name, value)

    def sync_weights(self) -> int:
        """Gather the weights of this worker's stage; returns the digest of all of them."""
        return super().sync_weights() if self.is_busy else 0

    def grad_norm(self) -> float:
        """The norm over all stages; NaN where DeepSpeed keeps none, or computes none here."""
        return super().grad_norm() if self.is_busy else float("nan")

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state; none without a place."""
        if not self.is_busy:
            return
        for piece in super().named_pieces():
            if piece.name.startswith("tied_modules."):
                # Only the tied weight of such a module is the same at every stage that has it.
                piece = replace(piece, name=f"stage {self._engine.stage_id} {piece.name}")
            yield piece


def _writes_nothing(*args: object, **kwargs: object) -> None:
    """In the place of ``engine._save_checkpoint``."""
