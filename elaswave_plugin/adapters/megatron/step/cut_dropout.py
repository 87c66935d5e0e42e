"""Dropout of micro-batches that are cut: a sample is dropped alike in whatever piece it is.

A piece has a stream of draws for each micro-batch of which it has rows (``rng.py``). The masks of
these micro-batches are drawn as a whole, and the piece's rows are cut out of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

from elaswave_plugin.adapters.megatron.compat.rng import cut_rows, cut_streams, keep_streams
from elaswave_plugin.adapters.megatron.compat.versions import record
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.around import around


def cut_patches() -> PatchSet:
    """Return the patches that hold while micro-batches are cut."""
    return PatchSet(
        [
            record(
                "torch.nn.functional:dropout",
                around(_of_cut_rows),
                "the samples of a cut micro-batch are dropped as in the whole one",
                *("input", "p", "training", "inplace"),
            )
        ]
    )


def _of_cut_rows(
    native: Callable[..., torch.Tensor],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """For hidden states [sequence, batch, hidden], attention [batch, heads, sequence, sequence]."""
    cut = cut_rows() if training else None
    if cut is None:
        return native(input, p, training, inplace)
    rows, size = cut
    dim = 1 if input.dim() == 3 else 0
    shape = list(input.shape)
    shape[dim] = size
    outside: Any = megatron_random._get_cuda_rng_state()
    streams, masks = cut_streams(), []
    for microbatch, start, stop in rows:
        megatron_random._set_cuda_rng_state(streams[microbatch])
        whole = native(input.new_ones(shape), p)
        streams[microbatch] = megatron_random._get_cuda_rng_state()
        masks.append(whole.narrow(dim, start, stop - start))
    megatron_random._set_cuda_rng_state(outside)
    keep_streams(streams)
    return input * torch.cat(masks, dim)
