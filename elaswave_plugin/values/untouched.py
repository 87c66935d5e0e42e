"""Zeros whose host memory is taken page by page, as they are written."""

import mmap
from math import prod

import torch


def untouched_zeros(*shape: int, device: torch.device | None = None) -> torch.Tensor:
    """Return float32 zeros; on the host no page of them is there before it is written.

    What is filled at once, or beside a step, would otherwise be written twice. Raises MemoryError.
    """
    if (device is not None and device.type != "cpu") or not prod(shape):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    num_bytes = prod(shape) * torch.float32.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=private)
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes of host memory") from error
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
