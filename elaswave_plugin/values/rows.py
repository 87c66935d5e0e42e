"""A tensor's elements in one row, of which the bytes can be shown."""

from typing import Any

import torch


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in order, detached; a copy only where they are not contiguous.

    One element counts as contiguous with any stride, and ``Tensor.view(dtype)`` wants stride one
    (torch 2.13).
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of all elements in order, of the tensor itself where it is contiguous."""
    array: Any = row_of(tensor).view(torch.uint8).numpy()
    return memoryview(array)
