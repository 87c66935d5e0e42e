"""The content of the records of DeepSpeed's jobs, also of those of its pipelines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.record import Recorder, facts_of


class CarriedEngine:
    """The engine of one worker."""

    def __init__(self, worker: Worker, framework: DeepSpeedFramework) -> None:
        self._worker = worker
        self._framework = framework
        self._engine = framework._engine

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the launch; shares change after a loss: none is dealt otherwise."""
        return facts_of(self._worker, rotates=False)

    @property
    def part(self) -> str:
        """Stage of the pipeline; none for a free worker."""
        shard_group = self._worker.placement.shard_group_of(self._worker.slot)
        return "" if shard_group is None else f"stage {shard_group.stage}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights, trained or not, and buffers; of ZeRO-3 those that are whole."""
        if not self.part:
            return
        for name, param in self._engine.module.named_parameters():
            if not hasattr(param, "ds_tensor"):
                yield f"weight {name} ({self.part})", param
        for name, buffer in self._engine.module.named_buffers():
            yield f"buffer {name} ({self.part})", buffer

    def settings(self) -> Mapping[str, Any]:
        """Plain settings of the optimizer's groups."""
        return {
            f"optimizer group {number} {key!r}": repr(value)
            for number, group in enumerate(self._framework._inner.param_groups)
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | tuple | None)
        }

    def models(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each module of the model."""
        for name, module in self._engine.module.named_modules():
            yield f"{name}." if name else "", module

    def owned(self) -> Iterable[object]:
        """The engine, the model with its weights, and the optimizers."""
        yield from (self._engine, self._engine.optimizer, self._framework._inner)
        yield from self._engine.module.modules()
        yield from self._engine.module.parameters()
        yield from self._engine.module.buffers()


def carried(worker: Worker, framework: DeepSpeedFramework) -> CarriedEngine:
    """Return the engine that this job carries, for the records."""
    return CarriedEngine(worker, framework)


def watch(recorder: Recorder) -> None:
    """Record what each iteration reads, what it draws until its backward pass, and its loss."""
    read, backward = ElasticLoader.read, EngineJob._backward

    def read_and_record(
        loader: ElasticLoader, items: Sequence[int], interval: tuple[int, int]
    ) -> tuple[Any, Any]:
        first = loader.position.served
        recorder.begin_pass(f"samples {first + interval[0]} to {first + interval[1] - 1}")
        share, batch = read(loader, items, interval)
        recorder.batch(batch)
        return share, batch

    def backward_and_record(
        job: EngineJob, native: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        result = backward(job, native, loss, *args, **kwargs)
        if not job.loop.dead:
            recorder.end_pass()
            recorder.losses({recorder.samples: loss})
        return result

    for owner, name, ours in (
        (ElasticLoader, "read", read_and_record),
        (EngineJob, "_backward", backward_and_record),
    ):
        setattr(owner, name, ours)
