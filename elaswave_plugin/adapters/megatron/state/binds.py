"""The models that a script has bound, each with its own optimizer, once, for one run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from elaswave_plugin.errors import ConfigurationError


class Binds:
    """The models and optimizers that ``bind`` was given so far."""

    def __init__(self) -> None:
        # The chunks of each model.
        self._models: list[tuple[Any, ...]] = []
        self._optimizers: list[Any] = []
        self._run: Mapping[str, Any] = {}

    @property
    def are_any(self) -> bool:
        """True if ``bind`` was called."""
        return bool(self._models)

    def add(self, chunks: Sequence[Any], optimizer: Any, run: Mapping[str, Any]) -> None:
        """Take one more; raises ConfigurationError for what is bound, or does not go with it.

        ``run``: what the call says of the run.
        """
        if any(chunk is one for chunk in chunks for model in self._models for one in model):
            raise ConfigurationError(
                "job.bind got a model that is bound already: call it once for each model"
            )
        if any(optimizer is one for one in self._optimizers):
            raise ConfigurationError(
                "job.bind got an optimizer that is bound already, with another model: give each "
                "model an optimizer of its own, write get_megatron_optimizer(config, [model])"
            )
        if self._models:
            _check_width()
        shared = _trained(chunks) & _trained([one for model in self._models for one in model])
        if shared:
            raise ConfigurationError(
                f"job.bind got a model that shares {len(shared)} trained weights with one that is "
                "bound already, and Megatron-Core's DDP keeps a weight in one model: share weights "
                "that are not trained, or put both models into one"
            )
        self._run = self._run or run
        for name, value in run.items():
            if value != self._run[name]:
                raise ConfigurationError(
                    f"job.bind got {name}={value!r}, and {name}={self._run[name]!r} with the model "
                    "before: all models train in one run, give the same in every call"
                )
        self._models.append(tuple(chunks))
        self._optimizers.append(optimizer)

    def check_trained(self, model: Any) -> None:
        """Raise ConfigurationError for a model that is to train and is not bound."""
        if chunks_of(model) not in self._models:
            raise ConfigurationError(
                "forward_backward trains a model that is not bound: call job.bind with it and its "
                "optimizer before the first step, or give it forward_only=True"
            )


def chunks_of(model: Any) -> tuple[Any, ...]:
    """The chunks of a model as a script gives it: a list of them, or the one."""
    return tuple(model) if isinstance(model, list | tuple) else (model,)


def _trained(chunks: Sequence[Any]) -> set[int]:
    """The identities of weights that are trained; what is no model is refused elsewhere."""
    modules = (chunk for chunk in chunks if isinstance(chunk, torch.nn.Module))
    return {id(one) for module in modules for one in module.parameters() if one.requires_grad}


def _check_width() -> None:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    for kind, size in sizes.items():
        if size > 1:
            raise ConfigurationError(
                f"job.bind is called for a second model, and {kind}_model_parallel_size is {size}:"
                " several models are carried in data-parallel jobs; set it to 1, or put both "
                "models into one that Megatron-Core wraps, with one optimizer"
            )
