"""Integers that come over a native group: zero until they arrive, so that an abort leaves ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# How token and position ids come to a worker: from a tensor-parallel group's first, or a stage.
FROM_A_ROOT = ("broadcast", "scatter")
RECEIVING_CALLS = (*FROM_A_ROOT, "recv", "recv_anysource")


def blank_ids(call: str, rank: int, operands: Sequence[Any]) -> None:
    """Zero the integers that a call is about to receive, on the current stream.

    What is queued behind a collective that is aborted runs on what the buffer holds. Where that is
    no id, a look-up by it is an error of the device, of which no worker of CUDA recovers. A zero
    is an id, at the cost of one small kernel, and nobody waits for the host.
    """
    if call not in RECEIVING_CALLS or (call in FROM_A_ROOT and rank == _root(operands)):
        return
    tensors = operands[0]
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            # As the call itself, which overwrites it all the same: not a change for autograd.
            tensor.data.zero_()


def _root(operands: Sequence[Any]) -> int:
    """The rank from which it comes: an argument, or a field of the options; 0 by default."""
    for one in operands[1:]:
        root = getattr(one, "rootRank", one)
        if isinstance(root, int):
            return root
    return 0
