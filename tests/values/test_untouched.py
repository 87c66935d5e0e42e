"""Zeros that take memory only where they are written."""

import re
from pathlib import Path

import pytest
import torch

from elaswave_plugin.values.untouched import untouched_zeros

MIB = 1 << 20


def resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def test_memory_is_taken_as_it_is_written() -> None:
    before = resident_bytes()
    zeros = untouched_zeros(2, 32 * MIB)  # 256 MiB
    assert resident_bytes() - before < 64 * MIB
    zeros[0].fill_(1.0)
    assert 96 * MIB < resident_bytes() - before < 192 * MIB
    assert not zeros[1].any() and zeros.dtype == torch.float32


def test_what_is_not_there_is_an_error_of_memory() -> None:
    """Memory that is refused is an error that a recovery answers by taking over less."""
    with pytest.raises(MemoryError, match=r"cannot allocate \d+ bytes"):
        untouched_zeros(1 << 50)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (2, 3)])
def test_they_are_zeros_of_that_shape(shape: tuple[int, ...]) -> None:
    zeros = untouched_zeros(*shape)
    assert zeros.shape == shape and not zeros.any()
    zeros += 1.0
    assert zeros.sum() == zeros.numel()
