"""All models of a job, each with its optimizer and scheduler, behind the verbs of a framework.

Their buckets lie one model after the other in one flat state, which is cut, sealed, moved and
compared as a whole. A job with one model is the case of one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from elaswave_plugin.adapters.megatron.compat.te_groups import forget_groups
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.state import buffers
from elaswave_plugin.adapters.megatron.state.adam import applied_steps, settings_of
from elaswave_plugin.adapters.megatron.state.optimizer_of import chunks_of
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
from elaswave_plugin.core.layout.shards import ALIGNMENT
from elaswave_plugin.core.planner.pipeline_flow import Flow
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.tracking.state_dump import NamedPiece
from elaswave_plugin.values.plain import decode, encode

# The rank lists that parallel_state keeps beside its groups.
_RANK_LISTS = (
    ("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "_TENSOR_MODEL_PARALLEL_GROUP"),
    ("_PIPELINE_GLOBAL_RANKS", "_PIPELINE_MODEL_PARALLEL_GROUP"),
    ("_MODEL_PARALLEL_GLOBAL_RANKS", "_MODEL_PARALLEL_GROUP"),
    ("_EMBEDDING_GLOBAL_RANKS", "_EMBEDDING_GROUP"),
    ("_POSITION_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GROUP"),
    ("_DATA_PARALLEL_GLOBAL_RANKS", "_DATA_PARALLEL_GROUP"),
    ("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP"),
    ("_CONTEXT_PARALLEL_GLOBAL_RANKS", "_CONTEXT_PARALLEL_GROUP"),
    ("_EXPERT_MODEL_PARALLEL_RANKS", "_EXPERT_MODEL_PARALLEL_GROUP"),
    # From 0.19 on.
    ("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "_GTP_WEIGHT_REMAT_GROUP"),
    ("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "_EXPERT_GTP_WEIGHT_REMAT_GROUP"),
)


class BoundModels:
    """The models of one worker, in the order in which they were bound."""

    def __init__(self, models: Sequence[MegatronFramework]) -> None:
        self.models = tuple(models)

    def of(self, model: Any) -> MegatronFramework | None:
        """Return the one with these chunks, or this one chunk; None if it is not bound."""
        return next((one for one in self.models if one.chunks == chunks_of(model)), None)

    # ---- what the state of a step is kept from --------------------------------------------------

    @property
    def chunks(self) -> tuple[DistributedDataParallel, ...]:
        """Those of all models."""
        return tuple(chunk for model in self.models for chunk in model.chunks)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, as they have them now."""
        return [group for model in self.models for group in model.inner_optimizer.param_groups]

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each of them, without a copy."""
        return [one for model in self.models for one in settings_of(model.inner_optimizer)]

    @property
    def applied_steps(self) -> int:
        """The updates that the optimizers count, also those before a checkpoint."""
        return max(applied_steps(model.inner_optimizer) for model in self.models)

    def before_updates(self, check: Callable[[Sequence[DistributedDataParallel]], None]) -> None:
        """Have the chunks of a model checked before its optimizer makes a step."""
        for model in self.models:
            model.inner_optimizer.register_step_pre_hook(
                lambda *_, chunks=model.chunks: check(chunks)
            )

    def updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of this optimizer is one of theirs, or a part of one."""
        return any(model.is_updating or model.inner_optimizer is optimizer for model in self.models)

    @property
    def _shards(self) -> list[FlatShard]:
        """The state of each; none without a place."""
        return [model.shard for model in self.models if model.is_placed]

    def masters_apart(self) -> list[torch.Tensor]:
        """The own masters that are no views of the weights; without a copy."""
        return [master for shard in self._shards for master in shard.masters_apart]

    def moments(self) -> list[torch.Tensor]:
        """The own moments, wherever they are, without a copy."""
        return [moment for shard in self._shards for moment in shard.moments]

    @property
    def are_masters_elsewhere(self) -> bool:
        """True while the script has masters of one elsewhere that are no views of the weights."""
        return any(shard.are_masters_elsewhere for shard in self._shards)

    def learning_rate(self) -> float:
        """That of the first group of the first optimizer, as Megatron-LM logs it."""
        return float(self.groups[0]["lr"])

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state, by global parameter name, and model where several."""
        for number, model in enumerate(self.models):
            where = f" (model {number})" if len(self.models) > 1 else ""
            for piece in model.named_pieces():
                yield replace(piece, name=piece.name + where)

    @contextmanager
    def modes_kept(self) -> Iterator[None]:
        """Put every module back into its mode (train, eval) if a recovery interrupts the block."""
        modes = [(one, one.training) for model in self.models for one in model.modules]
        try:
            yield
        except BaseException:
            for module, training in modes:
                module.training = training
            raise

    def take_loaded(self) -> None:
        """Take over what the script has loaded (collective over WORLD).

        Raises ConfigurationError where 16-bit weights are not those of their masters.
        """
        for model in self.models:
            model.take_loaded()

    def weights_digest(self) -> int:
        """The digest of the weights as they are here; 0 for a worker that has no place."""
        return _together(model.weights_digest() for model in self.models)

    # ---- the verbs ------------------------------------------------------------------------------

    def bucket_lengths(self) -> tuple[int, ...]:
        """Unpadded lengths of the buckets, in elements."""
        return buffers.bucket_lengths(self.chunks)

    @property
    def shard_alignment(self) -> int:
        """Megatron-Core's own alignment of bucket shards."""
        return ALIGNMENT

    def note_timers(self) -> None:
        """A call of the script's loop begins: what runs now is not begun again in its redo."""
        for model in self.models:
            model.note_timers()

    def pause(self) -> None:
        """Drop the interrupted step."""
        for model in self.models:
            model.pause()

    def rebind(self, plan: RecoveryPlan) -> None:
        """Point everything Megatron-Core cached at the new layout.

        What it captures by value: rank lists in parallel_state, and what each model has of its
        own. Group handles need nothing: the groups were edited in place.
        """
        for name, group in _RANK_LISTS:
            if getattr(parallel_state, name, None) is not None:
                members = dist.get_process_group_ranks(getattr(parallel_state, group))
                setattr(parallel_state, name, members)
        forget_groups()
        first = 0
        for model in self.models:
            model.rebind(plan, first=first)
            first += len(buffers.buckets(model.chunks))

    def take_place(self, flow: Flow) -> None:
        """Reduce as ``flow`` says from now on."""
        for model in self.models:
            model.take_place(flow)

    @property
    def keeps_state(self) -> bool:
        """Each part of a model has a bucket of its own; weights may still have to be gathered."""
        return not any(chunk.ddp_config.overlap_param_gather for chunk in self.chunks)

    def read_shard(self) -> list[torch.Tensor]:
        """The flat state, without copying: masters of all, then both moments of all."""
        parts = [model.shard.parts() for model in self.models]
        masters = [master for *masters, _, _ in parts for master in masters]
        return [*masters, *(one[-2] for one in parts), *(one[-1] for one in parts)]

    @property
    def moments_may_follow(self) -> bool:
        """True: no worker needs another's moments."""
        return True

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install masters of shape [shard_numel]; nothing without a place."""
        for shard, own in zip(self._shards, masters.split(self._numels()), strict=True):
            shard.write_weights(own)

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install moments of shape [2, shard_numel]; nothing without a place."""
        for shard, own in zip(self._shards, moments.split(self._numels(), dim=1), strict=True):
            shard.write_moments(own)

    def _numels(self) -> list[int]:
        return [shard.numel for shard in self._shards]

    def read_capsule(self) -> bytes:
        """That of each."""
        return encode([model.read_capsule() for model in self.models])

    def write_capsule(self, capsule: bytes) -> None:
        """Install what ``read_capsule`` returned."""
        for model, own in zip(self.models, decode(capsule, "the capsule"), strict=True):
            model.write_capsule(own)

    def sync_weights(self) -> int:
        """Gather the weights over the data-parallel group; returns their digest.

        0 for a worker that has no place.
        """
        return _together([model.sync_weights() for model in self.models])


def _together(digests: Iterable[int]) -> int:
    """One 63-bit digest of all; 0 where all are."""
    found = [*digests]
    if not any(found):
        return 0
    return xxhash.xxh3_64_intdigest(repr(found).encode()) >> 1
