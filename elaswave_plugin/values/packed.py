"""A plain value and the tensors in it as bytes, for a memory that outlives the worker."""

import struct
from typing import Any

import torch

from elaswave_plugin.values.plain import decode, encode
from elaswave_plugin.values.rows import bytes_of

_LENGTH = struct.Struct("<Q")


def packed(value: Any, what: str) -> bytes:
    """Return the bytes of a value with host tensors in it; raises ConfigurationError."""
    tensors: list[torch.Tensor] = []
    plain = encode(value, what, beside=tensors)
    return b"".join((_LENGTH.pack(len(plain)), plain, *(bytes_of(one) for one in tensors)))


def unpacked(data: bytes, what: str) -> Any:
    """Return the value of these bytes; raises UnreadableValueError."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    tensors: list[torch.Tensor] = []
    beside_bytes = len(data) - start
    value = decode(data[_LENGTH.size : start], what, beside=tensors, beside_bytes=beside_bytes)
    for tensor in tensors:
        into = bytes_of(tensor)
        into[:] = data[start : start + len(into)]
        start += len(into)
    return value
