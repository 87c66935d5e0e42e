"""The contract between recovery and a training framework: the verbs an adapter implements."""

from dataclasses import dataclass
from typing import Protocol

import torch

from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan


class Framework(Protocol):
    """One worker's model and optimizer, as the recovery sees them."""

    def bucket_lengths(self) -> tuple[int, ...]:
        """Unpadded lengths of the buckets, in elements; constant over the job."""

    @property
    def shard_alignment(self) -> int:
        """The alignment of shards: each shard of a bucket is a multiple of it, in elements."""

    def pause(self) -> None:
        """Drop the interrupted step: gradients, handles of operations, half-counted buckets."""

    @property
    def keeps_state(self) -> bool:
        """True if `rebind` leaves alone what the plan says is in place.

        The verbs that write and gather the state then leave it out until the next `rebind`.
        """

    def rebind(self, plan: RecoveryPlan) -> None:
        """Point everything the framework cached (sizes, ranks, shards, views) at the new layout."""

    def read_shard(self) -> list[torch.Tensor]:
        """Return the flat float32 state in the order of ``core/layout/shards.py``, not copied."""

    @property
    def moments_may_follow(self) -> bool:
        """True if each worker may write its moments at a time of its own, before the update."""

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install float32 masters of shape [shard_numel] as the worker's shard."""

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install exp_avg and exp_avg_sq, float32 of shape [2, shard_numel], of that shard."""

    def read_capsule(self) -> bytes:
        """The small state of the step: schedulers, scalers, step counts."""

    def write_capsule(self, capsule: bytes) -> None:
        """Install what ``read_capsule`` returned."""

    def sync_weights(self) -> int:
        """Gather the weights from their shards; returns a 63-bit digest of them (collective)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of a training step: mean loss, gradient norm, learning rate, tokens."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
