"""The content of the records of Megatron-Core's and Megatron-LM's jobs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.state.global_names import numbered_modules
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.record import Carried

# Counts of a router, which are dropped with the step.
_OF_A_STEP = ("local_tokens_per_expert",)


class CarriedMegatron(Carried):
    """The models, optimizers and schedulers of one worker."""

    rotates = True

    def __init__(self, worker: Worker, framework: BoundModels) -> None:
        super().__init__(worker)
        self._framework = framework

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The optimizer's groups."""
        return self._framework.groups

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights, trained or not, and buffers, with the layers' numbers of the whole model."""
        shard_group = self.shard_group
        if shard_group is None:
            return
        # Between steps a rank has the buffers of the replica of its number.
        tp, replica = shard_group.tp, shard_group.ranks.index(self.worker.slot)
        for prefix, module in self.models():
            for own, param in module._parameters.items():
                if param is not None:
                    yield f"weight {prefix}{own} (tp {tp})", param
            for own, buffer in module._buffers.items():
                if buffer is not None and own not in _OF_A_STEP:
                    yield f"buffer {prefix}{own} (tp {tp}, replica {replica})", buffer

    def models(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each module of each model, by the prefix of its tensors."""
        several = len(self._framework.models) > 1
        for number, model in enumerate(self._framework.models):
            where = f"model {number}: " if several else ""
            for chunk in model.chunks:
                for prefix, module in numbered_modules(chunk.module):
                    yield where + prefix, module

    def owned(self) -> Iterable[object]:
        """The models with their weights, and the optimizers."""
        for chunk in self._framework.chunks:
            yield from chunk.modules()
            yield from chunk.parameters()
            yield from chunk.module.buffers()
        yield from (model._optimizer for model in self._framework.models)

    def may_spread(self) -> bool:
        """True where no buffer can belong to one replica."""
        return not any(list(chunk.module.buffers()) for chunk in self._framework.chunks)
