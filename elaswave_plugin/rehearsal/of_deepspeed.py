"""The content of the records of DeepSpeed's jobs, also of those of its pipelines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.record import Carried


class CarriedEngine(Carried):
    """The engine of one worker; shares change after a loss: none is dealt otherwise."""

    def __init__(self, worker: Worker, framework: DeepSpeedFramework) -> None:
        super().__init__(worker)
        self._engine = framework._engine
        self._inner = framework._inner

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The optimizer's groups."""
        groups: Sequence[Mapping[str, Any]] = self._inner.param_groups
        return groups

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights, trained or not, and buffers; of ZeRO-3 those that are whole."""
        if self.shard_group is None:
            return
        stage = f"(stage {self.shard_group.stage})"
        for name, param in self._engine.module.named_parameters():
            if not hasattr(param, "ds_tensor"):
                yield f"weight {name} {stage}", param
        for name, buffer in self._engine.module.named_buffers():
            yield f"buffer {name} {stage}", buffer

    def models(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each module of the model."""
        for name, module in self._engine.module.named_modules():
            yield f"{name}." if name else "", module

    def owned(self) -> Iterable[object]:
        """The engine, the model with its weights, and the optimizers."""
        yield from (self._engine, self._engine.optimizer, self._inner)
        yield from self._engine.module.modules()
        yield from self._engine.module.parameters()
        yield from self._engine.module.buffers()
