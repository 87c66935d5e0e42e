"""Finds the optimizer of a model, which no list of Megatron-Core's has."""

import gc
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from elaswave_plugin.errors import ConfigurationError


def chunks_of(model: Any) -> tuple[Any, ...]:
    """The chunks of a model as a script gives it: a list of them, or the one."""
    return tuple(model) if isinstance(model, list | tuple) else (model,)


def optimizer_of(model: Any) -> Any:
    """The outermost optimizer of these chunks, among the objects that Python's collector has.

    Raises ConfigurationError where there is none, or more than one. One of torch's is none: it
    finds no gradients, which are in main_grad (findings/torch_adam_over_ddp_trains_nothing.sh).
    """
    chunks = {id(chunk) for chunk in chunks_of(model)}
    there = [one for one in gc.get_objects() if issubclass(type(one), MegatronOptimizer)]
    parts = {id(part) for one in there for part in getattr(one, "chained_optimizers", ())}
    found = [
        one
        for one in there
        if id(one) not in parts and chunks & {id(chunk) for chunk in _chunks_under(one)}
    ]
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} optimizers of Megatron-Core have the model that forward_backward trains,"
            " wanted one: write optimizer = get_megatron_optimizer(config, [model]) before it, as"
            " torch's own change no weight of such a model"
        )
    return found[0]


def _chunks_under(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [chunk for part in parts for chunk in getattr(part, "model_chunks", ())]
