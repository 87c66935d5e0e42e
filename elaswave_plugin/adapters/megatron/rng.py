"""Dropout keyed by (seed, step, micro-batch, layer, tp) instead of a running per-rank stream.

The key lives in the tracker's own saved states: activation recomputation restores those states in
the backward pass and so sees the key of the micro-batch that it recomputes (megatron/core/
tensor_parallel/random.py, ``CheckpointFunction``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.core.rng import draw_key

_KEY = "elaswave-key"
_EMBEDDING_LAYER = 0
_REPLICATED, _MODEL_PARALLEL = 0, 1


def set_key(step: int, microbatch: int) -> None:
    """Draw for this micro-batch from now on."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.states_[_KEY] = torch.tensor([step, microbatch], dtype=torch.int64)


def settle(seed: int, step: int) -> None:
    """Set the generators to states that follow from the step alone, and drop the key."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.states_.pop(_KEY, None)
    tp = parallel_state.get_tensor_model_parallel_rank()
    for number, name in enumerate(sorted(tracker.states_)):
        tracker.states_[name] = _state_of(draw_key(seed, step, number, tp))
    torch.cuda.manual_seed(draw_key(seed, step))
    torch.default_generator.manual_seed(draw_key(seed, step))


@contextmanager
def undone_draws() -> Iterator[None]:
    """What is drawn inside, as by a constructor, leaves no trace in any generator."""
    tracker = megatron_random.get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng():
        yield
    tracker.set_states(states)


def install_keyed_draws(model: torch.nn.Module, seed: int) -> None:
    """Make every transformer layer and the embedding reseed from the key before their forward."""
    for module in model.modules():
        if isinstance(module, TransformerLayer | LanguageModelEmbedding):
            module.register_forward_pre_hook(_reseed(seed))


def _reseed(seed: int) -> Callable[[torch.nn.Module, Any], None]:
    def hook(module: torch.nn.Module, inputs: Any) -> None:
        tracker = megatron_random.get_cuda_rng_tracker()
        if not module.training or _KEY not in tracker.states_:
            return
        step, microbatch = tracker.states_[_KEY].tolist()
        # Read at each call: a layer that moves keeps its module and changes its number.
        layer = getattr(module, "layer_number", _EMBEDDING_LAYER)
        tp = parallel_state.get_tensor_model_parallel_rank()
        shared_tp = tp if getattr(module.config, "sequence_parallel", False) else 0
        torch.cuda.manual_seed(draw_key(seed, step, microbatch, layer, _REPLICATED, shared_tp))
        name = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
        key = draw_key(seed, step, microbatch, layer, _MODEL_PARALLEL, tp)
        tracker.states_[name] = _state_of(key)

    return hook


def _state_of(key: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu")
    generator.manual_seed(key)
    return generator.get_state()
