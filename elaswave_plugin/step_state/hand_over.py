"""Hands state that is in no snapshot to another worker: its plain values, then its tensors."""

from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.values.gathered import checked
from elaswave_plugin.values.plain import decode, encode

_WHAT = "the state of a step"


def send(value: Any, rank: int) -> None:
    """Send a plain value with host tensors in it to a rank of WORLD."""
    tensors: list[torch.Tensor] = []
    plain = torch.frombuffer(bytearray(encode(value, _WHAT, beside=tensors)), dtype=torch.uint8)
    num_bytes = sum(one.numel() * one.element_size() for one in tensors)
    dist.send(torch.tensor([len(plain), num_bytes]), rank)
    for tensor in (plain, *tensors):
        dist.send(tensor.contiguous(), rank)


def receive(rank: int) -> Any:
    """Receive what a rank of WORLD sends; raises UnreadableValueError."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.recv(lengths, rank)
    length, beside_bytes = lengths.tolist()
    plain = torch.empty(checked(length, _WHAT), dtype=torch.uint8)
    dist.recv(plain, rank)
    tensors: list[torch.Tensor] = []
    value = decode(plain.numpy().data, _WHAT, beside=tensors, beside_bytes=beside_bytes)
    for tensor in tensors:
        dist.recv(tensor, rank)
    return value
