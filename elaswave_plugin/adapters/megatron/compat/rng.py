"""Draws keyed by (seed, step, micro-batch, layer, tp) instead of a running per-rank stream.

The key lives in the tracker's own saved states: activation recomputation restores those states in
the backward pass and so sees the key of the micro-batch that it recomputes (megatron/core/
tensor_parallel/random.py, ``CheckpointFunction``).

A piece that is no whole micro-batch draws for each micro-batch of which it has rows, by
``adapters/cut_draws.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.cut_draws import CutDraws, Part, parts_of
from elaswave_plugin.adapters.host_draws import seed_host, undone_numbers
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.core.step.rng import draw_key

_KEY, _CUT = "elaswave-key", "elaswave-cut"
_EMBEDDING_LAYER = 0
_REPLICATED, _MODEL_PARALLEL = 0, 1
# What is drawn for beside layers, which are counted from 0 on.
STEP, BODY, FORWARD_STEP, FORWARD_ONLY, WORK, PASSES, REHEARSED = -1, -2, -3, -4, -5, -6, -7


def set_key(seed: int, step: int, samples: Samples, *, size: int, forward_only: bool) -> None:
    """Draw for these samples of a step from now on; ``size``: samples of a micro-batch.

    Layers have keys of their own; what ``forward_step`` draws before them, or without them, as in
    a model beside the bound one, has that of its micro-batch, alike on all stages and, but in the
    streams of Megatron-Core's tracker, in a TP group.
    Where micro-batches are cut, layers draw by ``cut_by``.
    """
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.states_[_KEY] = torch.tensor([step, *samples, size], dtype=torch.int64)
    if _CUT in tracker.states_:
        # What is read for the next pass draws as it would in a whole micro-batch.
        tracker.states_[_CUT].end()
    kind = FORWARD_ONLY if forward_only else FORWARD_STEP
    _key_streams(seed, kind, step, samples.start)
    seed_generators(draw_key(seed, kind, step, samples.start))


def cut_by(draws: CutDraws) -> None:
    """Have layers draw by these, until generators are settled: micro-batches are cut."""
    megatron_random.get_cuda_rng_tracker().states_[_CUT] = draws


def seed_generators(key: int) -> None:
    """Have torch, its device, NumPy and Python draw by a key."""
    torch.cuda.manual_seed(key)
    seed_host(key)


def keyed_microbatch() -> int | None:
    """The micro-batch that is drawn for now, also where it is recomputed; None without a key."""
    key = megatron_random.get_cuda_rng_tracker().states_.get(_KEY)
    return None if key is None else int(key[1] // key[-1])


def settle(seed: int, *moment: int) -> None:
    """Set the generators to states that follow from the moment alone, and drop the key."""
    tracker = megatron_random.get_cuda_rng_tracker()
    if _CUT in tracker.states_:
        tracker.states_.pop(_CUT).end()
    tracker.states_.pop(_KEY, None)
    _key_streams(seed, *moment)
    # Otherwise these would be those of the stage that a worker began in, or of what it ran last.
    seed_generators(draw_key(seed, *moment))


def _key_streams(seed: int, *moment: int) -> None:
    """Have each stream of the tracker draw by a key, for draws without a key of their own."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tp = parallel_state.get_tensor_model_parallel_rank()
    for number, name in enumerate(sorted(tracker.states_.keys() - {_KEY, _CUT})):
        tracker.states_[name] = _kept(draw_key(seed, *moment, number, tp))


@contextmanager
def undone_draws() -> Iterator[None]:
    """Put all generators back after the draws inside, such as those of a constructor."""
    tracker = megatron_random.get_cuda_rng_tracker()
    states = {
        name: kept.clone_state() if isinstance(kept, torch.Generator) else kept
        for name, kept in tracker.get_states().items()
    }
    # By default it asks every GPU of the node, and so makes a process's state on each.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), undone_numbers():
        yield
    tracker.set_states(states)


@contextmanager
def other_draws(seed: int, step: int) -> Iterator[None]:
    """Inside, draws without a key are others; no generator has a trace of them afterwards."""
    with undone_draws():
        settle(seed, REHEARSED, step)
        yield


def keeps_generators() -> bool:
    """Return whether the tracker keeps generators where others keep their states.

    Transformer Engine's does (te_rng_tracker), and Megatron-Core's own for CUDA graphs.
    """
    states = megatron_random.get_cuda_rng_tracker().states_
    return any(isinstance(kept, torch.Generator) for kept in states.values())


def install_keyed_draws(model: torch.nn.Module, seed: int, *, number: int = 0) -> None:
    """Make every transformer layer and the embedding reseed from the key before their forward.

    ``number``: of the model among those that the job trains, whose layers draw apart.
    """
    for module in model.modules():
        if isinstance(module, TransformerLayer | LanguageModelEmbedding):
            module.register_forward_pre_hook(partial(_reseed, seed, number))


def _reseed(seed: int, number: int, module: torch.nn.Module, inputs: Any) -> None:
    tracker = megatron_random.get_cuda_rng_tracker()
    if not module.training or _KEY not in tracker.states_:
        return
    step, start, stop, size = tracker.states_[_KEY].tolist()
    # Read at each call: a layer that moves keeps its module and changes its number.
    layer = getattr(module, "layer_number", _EMBEDDING_LAYER) + (number << 32)
    tp = parallel_state.get_tensor_model_parallel_rank()
    shared_tp = tp if getattr(module.config, "sequence_parallel", False) else 0

    def parts(stream: int) -> tuple[Part, ...]:
        of_tp = tp if stream == _MODEL_PARALLEL else shared_tp
        firsts = range(start // size * size, stop, size)
        return parts_of(
            (start, stop),
            [(first, first + size) for first in firsts],
            key=lambda first: draw_key(seed, step, first // size, layer, stream, of_tp),
        )

    replicated, model_parallel = parts(_REPLICATED), parts(_MODEL_PARALLEL)
    for one in (replicated, model_parallel) if _CUT in tracker.states_ else ():
        tracker.states_[_CUT].know(one)
    torch.cuda.manual_seed(replicated[0].key)
    name = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
    tracker.states_[name] = _kept(model_parallel[0].key)


def _kept(key: int) -> torch.Tensor | torch.Generator:
    """Return what the tracker keeps for a stream: a generator, or the state of one.

    Always another generator, where it keeps these: entering a stream takes the one that is kept by
    reference, and code that is in the stream now goes back to its own.
    """
    generator = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu")
    generator.manual_seed(key)
    return generator if keeps_generators() else generator.get_state()
