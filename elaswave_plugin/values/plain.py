"""Plain values as bytes, for other workers of the job, and back; no class of a script is built.

Plain are None, numbers, strings, bytes, tensors and NumPy's arrays; lists, tuples, sets and
mappings of such; what torch calls a dtype, a size or a device. They travel as msgpack, in which
a list that begins with a mark stands for all that msgpack has no type for. In front is the version
of the package that wrote them: another one may keep something else under the same name.
"""

import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from types import NoneType, SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError, UnreadableValueError
from elaswave_plugin.version import __version__


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in order, detached; a copy only where they are not contiguous.

    One element counts as contiguous with any stride, and ``Tensor.view(dtype)`` wants stride one
    (torch 2.13).
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of all elements in order, of the tensor itself where it is contiguous."""
    # After numpy() torch would refuse to resize the storage, as scripts do that offload.
    array: Any = np.from_dlpack(row_of(tensor).view(torch.uint8))
    return memoryview(array)


# Of containers in containers.
DEEPEST = 100
# Of one value.
LONGEST_BYTES = 1 << 30
_MAGIC = b"EWv1"
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\w{1,9}\])?")
_INTEGERS = re.compile(r"torch\.(bool|u?int(8|16|32|64))")


class As(IntEnum):
    """The marks: what a list stands for that begins with one."""

    TUPLE = 1
    SET = 2
    FROZEN_SET = 3
    SIZE = 4
    ORDERED_DICT = 5
    COUNTER = 6
    NAMESPACE = 7
    SIMPLE_NAMESPACE = 8
    PAIRS = 9
    INTEGER = 10
    COMPLEX = 11
    BYTE_ARRAY = 12
    DTYPE = 13
    DEVICE = 14
    ARRAY = 15
    SCALAR = 16
    TENSOR = 17
    META_TENSOR = 18
    TENSOR_BESIDE = 19


def encode(value: Any, what: str = "", *, beside: list[torch.Tensor] | None = None) -> bytes:
    """Return the bytes of a value; ``what`` names it where it is refused.

    ``beside``: is given the tensors, which then travel in another way. Raises ConfigurationError
    for what is not plain, and for more than LONGEST_BYTES.
    """
    body = msgpack.packb(_Writer(beside).told(value, what), unicode_errors="surrogatepass")
    if len(body) > LONGEST_BYTES:
        raise ConfigurationError(
            f"{what or 'a value'} has {len(body)} bytes, and at most {LONGEST_BYTES} go to other"
            " workers: keep less in it"
        )
    return _head(__version__) + bytes(body)


def check(value: Any, what: str) -> None:
    """Raise ConfigurationError where a value, which is called ``what``, is not plain."""
    _Writer([]).told(value, what)


def is_plain(value: Any) -> bool:
    """Return whether a value is plain."""
    try:
        check(value, "")
    except ConfigurationError:
        return False
    return True


def decode(
    data: bytes | memoryview,
    what: str = "a value",
    *,
    beside: list[torch.Tensor] | None = None,
    beside_bytes: int = 0,
) -> Any:
    """Return the value of these bytes; ``what`` names it where it is refused.

    ``beside``: is given tensors of undefined values for those that travel in another way, which
    have ``beside_bytes`` together. Raises UnreadableValueError for bytes that are no value, or one
    of another version.
    """
    body = _body(bytes(data), what)
    reader = _Reader(beside, beside_bytes)
    try:
        value = msgpack.unpackb(
            body,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            list_hook=reader.made,
            ext_hook=_mark,
        )
    except (ValueError, TypeError, RuntimeError, ArithmeticError, msgpack.UnpackException) as error:
        raise UnreadableValueError(
            f"{what} cannot be read ({type(error).__name__}: {error!s:.200}): its bytes were"
            " changed on the way, or are something else"
        ) from error
    if reader.left_bytes:
        raise UnreadableValueError(f"{what} describes {reader.left_bytes} bytes too few beside it")
    return value


def _head(version: str) -> bytes:
    return _MAGIC + bytes([len(version)]) + version.encode()


def _body(data: bytes, what: str) -> bytes:
    """Return what is behind the version; raises UnreadableValueError for another one."""
    own, start = _head(__version__), len(_MAGIC) + 1
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        raise UnreadableValueError(f"{what} cannot be read: it begins with {data[:8]!r}")
    head, body = data[: start + data[start - 1]], data[start + data[start - 1] :]
    if head != own:
        raise UnreadableValueError(
            f"{what} is of version {head[start:].decode('ascii', 'replace')!r} of elaswave_plugin,"
            f" and this worker runs {__version__!r}: install the same version on every node"
        )
    if len(body) > LONGEST_BYTES:
        raise UnreadableValueError(f"{what} has {len(body)} bytes, wanted at most {LONGEST_BYTES}")
    return body


@cache
def _containers() -> Mapping[type, As]:
    """The marks of containers of a few kinds; what is derived from them is another kind."""
    return {
        tuple: As.TUPLE,
        set: As.SET,
        frozenset: As.FROZEN_SET,
        torch.Size: As.SIZE,
        OrderedDict: As.ORDERED_DICT,
        Counter: As.COUNTER,
        Namespace: As.NAMESPACE,
        SimpleNamespace: As.SIMPLE_NAMESPACE,
    }


@cache
def _dtypes() -> Mapping[str, torch.dtype]:
    """The dtypes of which a tensor's bytes are its values."""
    found = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return {
        str(one): one
        for one in found
        if one.is_floating_point or one.is_complex or _INTEGERS.fullmatch(str(one))
    }


# ---- to bytes -----------------------------------------------------------------------------------


def _marked(mark: As, *parts: Any) -> list[Any]:
    return [msgpack.ExtType(mark, b""), *parts]


def _is_alike(value: Any) -> bool:
    """Return whether msgpack has a type for it."""
    kind = type(value)
    if kind is int:
        return bool(_LEAST_INT <= value <= _MOST_INT)
    return kind in (NoneType, bool, float, str, bytes)


class _Writer:
    """Makes of one value what msgpack has types for."""

    def __init__(self, beside: list[torch.Tensor] | None) -> None:
        self._beside = beside

    def told(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return it; raises ConfigurationError."""
        if _is_alike(value):
            return value
        if depth > DEEPEST:
            raise ConfigurationError(
                f"{where:.200} is nested deeper than {DEEPEST}, or in itself: keep less in it"
            )
        kind: Any = type(value)
        if kind is dict:
            return self._pairs(value, where, depth)
        if kind is list:
            return self._items(value, where, depth)
        mark = _containers().get(kind)
        if mark in (As.NAMESPACE, As.SIMPLE_NAMESPACE):
            return _marked(mark, self._pairs(vars(value), where, depth))
        if mark in (As.ORDERED_DICT, As.COUNTER):
            return _marked(mark, self._pairs(value, where, depth))
        if mark is not None:
            return _marked(mark, *self._items(value, where, depth))
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        return _leaf(value, where)

    def _pairs(self, value: Any, where: str, depth: int) -> dict[Any, Any] | list[Any]:
        keys = [self.told(key, f"the key {key!r:.80} of {where}", depth + 1) for key in value]
        parts = [self._part(one, where, key, depth) for key, one in value.items()]
        if all(map(_is_alike, keys)):
            return dict(zip(keys, parts, strict=True))
        both = zip(keys, parts, strict=True)
        return _marked(As.PAIRS, *(one for pair in both for one in pair))

    def _items(self, value: Any, where: str, depth: int) -> list[Any]:
        return [self._part(one, where, number, depth) for number, one in enumerate(value)]

    def _part(self, value: Any, where: str, key: Any, depth: int) -> Any:
        return value if _is_alike(value) else self.told(value, f"{where}[{key!r:.80}]", depth + 1)

    def _tensor(self, value: torch.Tensor, where: str) -> list[Any]:
        dtype, shape = str(value.dtype), list(value.shape)
        is_whole = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not is_whole or value.layout != torch.strided or dtype not in _dtypes():
            raise _refusal(where, f"a {type(value).__qualname__} of {dtype}, {value.layout}")
        if value.is_meta:
            return _marked(As.META_TENSOR, dtype, shape)
        if self._beside is not None:
            self._beside.append(value)
            return _marked(As.TENSOR_BESIDE, dtype, shape)
        flat = row_of(value.cpu().resolve_conj().resolve_neg())
        return _marked(As.TENSOR, dtype, shape, flat.view(torch.uint8).numpy().tobytes())


def _leaf(value: Any, where: str) -> list[Any]:
    """A value that contains no others; raises ConfigurationError."""
    kind = type(value)
    if kind is int:
        data = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        return _marked(As.INTEGER, data)
    if kind is complex:
        return _marked(As.COMPLEX, value.real, value.imag)
    if kind is bytearray:
        return _marked(As.BYTE_ARRAY, bytes(value))
    if kind is torch.dtype and str(value) in _dtypes():
        return _marked(As.DTYPE, str(value))
    if kind is torch.device:
        return _marked(As.DEVICE, str(value))
    if kind is np.ndarray and _NUMPY_DTYPE.fullmatch(value.dtype.str):
        return _marked(As.ARRAY, value.dtype.str, list(value.shape), value.tobytes())
    if kind is np.ndarray:
        raise _refusal(where, f"a NumPy array of {value.dtype}")
    if isinstance(value, np.generic) and _NUMPY_DTYPE.fullmatch(value.dtype.str):
        return _marked(As.SCALAR, value.dtype.str, value.tobytes())
    raise _refusal(where, f"of the class {kind.__module__}.{kind.__qualname__}")


def _refusal(where: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where or 'a value'} is {seen}, and only plain values go from worker to worker: numbers,"
        " strings, bytes, tensors and NumPy arrays; lists, tuples, sets and dicts of these. Keep"
        " such values in its place, or leave it out"
    )


# ---- from bytes ---------------------------------------------------------------------------------


def _mark(code: int, data: bytes) -> As:
    """Return a mark; raises ValueError for anything else of a type of its own."""
    if data:
        raise ValueError(f"a mark {code} with data")
    return As(code)


class _Reader:
    """Makes of what msgpack has types for one value."""

    def __init__(self, beside: list[torch.Tensor] | None, beside_bytes: int) -> None:
        self._beside = beside
        self.left_bytes = beside_bytes

    def made(self, items: list[Any]) -> Any:
        """Return what a list stands for; raises ValueError, TypeError, RuntimeError."""
        if not items or type(items[0]) is not As:
            return items
        mark, *parts = items
        match mark, parts:
            case As.TUPLE, _:
                return tuple(parts)
            case As.SET, _:
                return set(parts)
            case As.FROZEN_SET, _:
                return frozenset(parts)
            case As.SIZE, _:
                return torch.Size(parts)
            case As.PAIRS, _:
                return dict(zip(parts[::2], parts[1::2], strict=True))
            case As.ORDERED_DICT, [dict(pairs)]:
                return OrderedDict(pairs)
            case As.COUNTER, [dict(pairs)]:
                return Counter(pairs)
            case As.NAMESPACE, [dict(pairs)]:
                return Namespace(**pairs)
            case As.SIMPLE_NAMESPACE, [dict(pairs)]:
                return SimpleNamespace(**pairs)
            case As.INTEGER, [bytes(data)]:
                return int.from_bytes(data, "big", signed=True)
            case As.COMPLEX, [float(real), float(imag)]:
                return complex(real, imag)
            case As.BYTE_ARRAY, [bytes(data)]:
                return bytearray(data)
            case As.DTYPE, [str(name)]:
                return _dtype(name)
            case As.DEVICE, [str(name)]:
                return torch.device(name)
            case As.ARRAY, [str(name), list(shape), bytes(data)]:
                return _array(name, shape, data)
            case As.SCALAR, [str(name), bytes(data)]:
                return _array(name, [], data)[()]
            case As.TENSOR, [str(name), list(shape), bytes(data)]:
                return _tensor(_dtype(name), shape, data)
            case As.META_TENSOR, [str(name), list(shape)] if _count(shape) >= 0:
                return torch.empty(shape, dtype=_dtype(name), device="meta")
            case As.TENSOR_BESIDE, [str(name), list(shape)]:
                return self._room(_dtype(name), shape)
        raise ValueError(f"no parts of a {mark.name}: {parts!r:.80}")

    def _room(self, dtype: torch.dtype, shape: list[Any]) -> torch.Tensor:
        self.left_bytes -= _count(shape) * dtype.itemsize
        if self._beside is None or self.left_bytes < 0:
            raise ValueError("a tensor that does not come beside it")
        self._beside.append(torch.empty(shape, dtype=dtype))
        return self._beside[-1]


def _count(shape: list[Any]) -> int:
    """Return the elements of a shape; raises ValueError for one that is none."""
    if any(type(one) is not int or one < 0 for one in shape):
        raise ValueError(f"no shape: {shape!r:.80}")
    return math.prod(shape)


def _dtype(name: str) -> torch.dtype:
    if name not in _dtypes():
        raise ValueError(f"no dtype: {name!r:.80}")
    return _dtypes()[name]


def _array(name: str, shape: list[Any], data: bytes) -> np.ndarray[Any, Any]:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"no dtype: {name!r:.80}")
    dtype = np.dtype(name)
    if _count(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape!r:.80}")
    return np.ndarray(shape, dtype, bytearray(data)) if data else np.empty(shape, dtype)


def _tensor(dtype: torch.dtype, shape: list[Any], data: bytes) -> torch.Tensor:
    if _count(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape!r:.80}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


# Around what `encode` bounds: the version that it names.
_LONGEST = LONGEST_BYTES + (1 << 10)


def gathered(
    mine: Any, what: str = "what a worker tells the others", *, group: Any = None
) -> list[Any]:
    """Gather each worker's plain value, by rank (collective over WORLD, or a group).

    Raises ConfigurationError for one of this worker that is not plain, UnreadableValueError.
    """
    told = _bytes_of(mine, what)
    count = torch.tensor(len(told))
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    lengths = [checked(int(one), what) for one in counts]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(told)] = told
    rows = [torch.zeros_like(row) for _ in lengths]
    dist.all_gather(rows, row, group=group)
    return [
        decode(row[:length].numpy().data, f"{what} (of rank {rank})")
        for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def told_by(rank: int, mine: Any, what: str = "what a worker tells the others") -> Any:
    """Return the plain value of one rank on all; ``mine`` counts there (collective over WORLD)."""
    is_source = dist.get_rank() == rank
    told = _bytes_of(mine if is_source else None, what)
    count = torch.tensor(len(told))
    dist.broadcast(count, src=rank)
    length = checked(int(count), what)
    if not is_source:
        told = torch.zeros(length, dtype=torch.uint8)
    dist.broadcast(told, src=rank)
    return decode(told.numpy().data, f"{what} (of rank {rank})")


def _bytes_of(value: Any, what: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(value, what)), dtype=torch.uint8)


def checked(length: int, what: str) -> int:
    """Return a length that another worker has told; raises UnreadableValueError for no such one."""
    if not 0 < length <= _LONGEST:
        raise UnreadableValueError(f"{what} has {length} bytes, wanted at most {_LONGEST}")
    return length


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
