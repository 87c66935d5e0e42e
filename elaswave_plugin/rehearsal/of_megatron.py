"""The content of the records of Megatron-Core's and Megatron-LM's jobs."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.megatron import microbatches
from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.microbatches import Microbatches
from elaswave_plugin.adapters.megatron.state.global_names import numbered_modules
from elaswave_plugin.adapters.megatron.step.data import KeyedBatches
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.record import Recorder, facts_of

# Counts of a router, which are dropped with the step.
_OF_A_STEP = ("local_tokens_per_expert",)
_LM_LOADER = "elaswave_plugin.adapters.megatron_lm.loader"


class CarriedMegatron:
    """The models, optimizers and schedulers of one worker."""

    def __init__(self, worker: Worker, framework: BoundModels) -> None:
        self._worker = worker
        self._framework = framework

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the launch."""
        return facts_of(self._worker, rotates=True)

    @property
    def part(self) -> str:
        """Stage and place in the TP group; none for a free worker."""
        shard_group = self._worker.placement.shard_group_of(self._worker.slot)
        return "" if shard_group is None else f"stage {shard_group.stage} tp {shard_group.key[1]}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights, trained or not, and buffers, with the layers' numbers of the whole model."""
        shard_group = self._worker.placement.shard_group_of(self._worker.slot)
        if shard_group is None:
            return
        # Between steps a rank has the buffers of the replica of its number.
        tp, replica = shard_group.tp, shard_group.ranks.index(self._worker.slot)
        for prefix, module in self.models():
            for own, param in module._parameters.items():
                if param is not None:
                    yield f"weight {prefix}{own} (tp {tp})", param
            for own, buffer in module._buffers.items():
                if buffer is not None and own not in _OF_A_STEP:
                    yield f"buffer {prefix}{own} (tp {tp}, replica {replica})", buffer

    def settings(self) -> Mapping[str, Any]:
        """Plain settings of the optimizer's groups."""
        return {
            f"optimizer group {number} {key!r}": repr(value)
            for number, group in enumerate(self._framework.groups)
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | tuple | list | None) and key != "params"
        }

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


def carried(worker: Worker, framework: BoundModels) -> CarriedMegatron:
    """Return the models that this job carries, for the records."""
    return CarriedMegatron(worker, framework)


def may_spread(framework: BoundModels) -> bool:
    """Return whether several replicas may run micro-batches of one: no buffer can belong to one."""
    return not any(list(chunk.module.buffers()) for chunk in framework.chunks)


def watch(recorder: Recorder) -> None:
    """Record each forward pass, what it reads, and the losses."""
    places: dict[str, Any] = vars(microbatches)
    in_order, run = places["in_order"], Microbatches.forward_backward

    def recorded(
        forward_step: Callable[..., Any],
        pieces: Sequence[Samples],
        begin: Callable[[Any, Any, Samples], None],
    ) -> Callable[..., Any]:
        def begun(batches: Any, chunk: Any, samples: Samples) -> None:
            begin(batches, chunk, samples)
            number = getattr(chunk, "vp_stage", None)
            chunk_said = f" in chunk {number}" if number else ""
            recorder.begin_pass(f"samples {samples.start} to {samples.stop - 1}{chunk_said}")

        def passed(*args: Any, **kwargs: Any) -> Any:
            output = forward_step(*args, **kwargs)
            recorder.end_pass()
            return output

        ordered: Callable[..., Any] = in_order(passed, pieces, begun)
        return ordered

    def run_and_record(mine: Microbatches, *args: Any, **kwargs: Any) -> list[Any]:
        recorder.kind = "evaluation" if kwargs["forward_only"] else "training"
        losses = run(mine, *args, **kwargs)
        if mine.reports_losses and not kwargs["forward_only"]:
            both = zip(mine.reports, losses, strict=False)
            recorder.losses({f"micro-batch {number}": loss for number, loss in both})
        return losses

    places["in_order"] = recorded
    setattr(Microbatches, "forward_backward", run_and_record)  # noqa: B010  # mypy allows no other
    _watch_reading(KeyedBatches, recorder)
    if _LM_LOADER in sys.modules:
        _watch_reading(sys.modules[_LM_LOADER].MicrobatchLoader, recorder)


def _watch_reading(loader: Any, recorder: Recorder) -> None:
    read = loader.__next__

    def read_and_record(batches: Any) -> Any:
        batch = read(batches)
        recorder.batch(batch)
        return batch

    loader.__next__ = read_and_record
