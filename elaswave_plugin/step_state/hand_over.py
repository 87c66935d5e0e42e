"""Hands state that is in no snapshot to another worker: its plain values, then its tensors.

Pickled are values that one worker of the job made, for another one of it.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return tuple(value.shape), value.dtype


class _Unpickler(pickle.Unpickler):
    """Makes room for the tensors, which are met in the order in which they were listed."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, told: Any) -> torch.Tensor:
        shape, dtype = told
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def send(value: Any, rank: int) -> None:
    """Send plain values and host tensors, nested in any way, to a rank of WORLD."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    plain = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    dist.send(torch.tensor(len(plain)), rank)
    for tensor in (plain, *pickler.tensors):
        dist.send(tensor.contiguous(), rank)


def receive(rank: int) -> Any:
    """Receive what a rank of WORLD sends."""
    length = torch.tensor(0)
    dist.recv(length, rank)
    plain = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(plain, rank)
    unpickler = _Unpickler(io.BytesIO(plain.numpy().tobytes()))
    value = unpickler.load()
    for tensor in unpickler.tensors:
        dist.recv(tensor, rank)
    return value
