"""Tensors as flat bytes, element-wise folds over such bytes, and reusable scratch memory."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from elaswave_plugin.errors import ConfigurationError

_SLICE_ELEMENTS = 32_767
# At 32,768 elements torch would start an OpenMP team in whichever thread folds.

_POOL_BYTES = 256 << 20
_SMALLEST_BYTES = 1 << 12


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # One element may have any stride, and torch shows the bytes of stride one alone.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    # After numpy() torch would refuse to resize the storage, as scripts do that offload.
    return _view(np.from_dlpack(flat.view(torch.uint8)))


def _view(array: Any) -> memoryview:
    return memoryview(array)


def pieces(view: memoryview, count: int, item_bytes: int) -> list[memoryview]:
    """Cut into `count` consecutive pieces of whole elements, as even as possible."""
    total = len(view) // item_bytes
    cuts = [total * i // count * item_bytes for i in range(count + 1)]
    return [view[start:stop] for start, stop in pairwise(cuts)]


Combine = Callable[[memoryview, memoryview, memoryview], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A reduction of one dtype: combine(a, b, out) is element-wise; finish scales the result."""

    name: str
    item_bytes: int
    combine: Combine
    finish: Callable[[memoryview, int], None]


_NUMPY_DTYPES: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.float32, np.float32),
    (torch.float64, np.float64),
    (torch.int8, np.int8),
    (torch.int16, np.int16),
    (torch.int32, np.int32),
    (torch.int64, np.int64),
    (torch.uint8, np.uint8),
    (torch.bool, np.bool_),
)
_TORCH_DTYPES = (torch.bfloat16, torch.float16)
_NUMPY_FUNCTIONS: tuple[tuple[str, Any], ...] = (
    ("SUM", np.add),
    ("AVG", np.add),
    ("PRODUCT", np.multiply),
    ("MAX", np.maximum),
    ("MIN", np.minimum),
    ("BAND", np.bitwise_and),
    ("BOR", np.bitwise_or),
    ("BXOR", np.bitwise_xor),
)
_TORCH_FUNCTIONS: tuple[tuple[str, Any], ...] = (
    ("SUM", torch.add),
    ("AVG", torch.add),
    ("PRODUCT", torch.mul),
    ("MAX", torch.maximum),
    ("MIN", torch.minimum),
)


def make_fold(name: str, dtype: torch.dtype) -> Fold:
    """The fold for a torch ReduceOp name. Raises ConfigurationError where there is none."""
    numpy_dtype = dict(_NUMPY_DTYPES).get(dtype)
    if numpy_dtype is not None and name in dict(_NUMPY_FUNCTIONS):
        return _numpy_fold(name, np.dtype(numpy_dtype))
    if dtype in _TORCH_DTYPES and name in dict(_TORCH_FUNCTIONS):
        return _torch_fold(name, dtype)
    raise ConfigurationError(
        f"reduction {name} of {dtype} is not supported: use SUM, AVG, PRODUCT, MAX or MIN of a "
        "float, integer or bool tensor (bitwise ones of integers or bools)"
    )


def _numpy_fold(name: str, dtype: "np.dtype[Any]") -> Fold:
    function = dict(_NUMPY_FUNCTIONS)[name]
    if dtype.kind == "f" and name in ("BAND", "BOR", "BXOR"):
        raise ConfigurationError(f"reduction {name} of {dtype} is not supported: use integers")

    def combine(a: memoryview, b: memoryview, out: memoryview) -> None:
        left, right = np.frombuffer(a, dtype), np.frombuffer(b, dtype)
        with np.errstate(all="ignore"):  # inf and nan are results here, as in torch
            function(left, right, out=np.frombuffer(out, dtype))

    def finish(out: memoryview, count: int) -> None:
        if name == "AVG":
            values = np.frombuffer(out, dtype)
            divide = np.true_divide if dtype.kind == "f" else np.floor_divide
            divide(values, dtype.type(count), out=values)

    return Fold(name=name, item_bytes=dtype.itemsize, combine=combine, finish=finish)


def _torch_fold(name: str, dtype: torch.dtype) -> Fold:
    function = dict(_TORCH_FUNCTIONS)[name]
    item_bytes = dtype.itemsize
    step = _SLICE_ELEMENTS * item_bytes

    def combine(a: memoryview, b: memoryview, out: memoryview) -> None:
        for start in range(0, len(out), step):
            span = slice(start, start + step)
            left, right, into = (torch.frombuffer(v[span], dtype=dtype) for v in (a, b, out))
            function(left, right, out=into)

    def finish(out: memoryview, count: int) -> None:
        if name == "AVG":
            for start in range(0, len(out), step):
                torch.frombuffer(out[start : start + step], dtype=dtype).div_(count)

    return Fold(name=name, item_bytes=item_bytes, combine=combine, finish=finish)


class Scratch:
    """Memory that operations borrow: fresh pages cost more than the copy that they hold."""

    def __init__(self, limit_bytes: int = _POOL_BYTES) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._held_bytes = 0
        self._limit_bytes = limit_bytes

    def take(self, size_bytes: int) -> memoryview:
        """Exactly `size_bytes` of memory with arbitrary content."""
        full = max(_SMALLEST_BYTES, 1 << max(size_bytes - 1, 0).bit_length())
        stack = self._free.get(full)
        if stack:
            self._held_bytes -= full
            return stack.pop()[:size_bytes]
        return _view(np.empty(full, np.uint8))[:size_bytes]

    def give_back(self, view: memoryview) -> None:
        """Return what take() gave; the caller must not use it again."""
        array = view.obj
        full = array.nbytes if isinstance(array, np.ndarray) else 0
        if full and self._held_bytes + full <= self._limit_bytes:
            self._held_bytes += full
            self._free.setdefault(full, []).append(_view(array))
