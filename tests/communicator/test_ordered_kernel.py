"""The kernel of sums in rank order: its source, compiled for the CPU, has the bits of the loop."""

import ctypes
import subprocess
from itertools import product

import pytest
import torch

from elaswave_plugin.communicator.device.ordered_sums import (
    PLACES,
    SOURCE,
    THREADS,
    CombineKernels,
    combine_in_a_loop,
)
from tests.communicator.test_process_group import same_bits

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# What a CUDA compiler has of its own, for the CPU's: one thread does all places of a grid.
BEFORE = """
#include <cstring>
#define __device__
#define __global__
struct Index { int x; };
static Index blockIdx, threadIdx, blockDim;
static float __uint_as_float(unsigned int bits) { float f; memcpy(&f, &bits, 4); return f; }
static unsigned int __float_as_uint(float f) { unsigned int u; memcpy(&u, &f, 4); return u; }
static float widened_half(unsigned short value) {
    _Float16 half; memcpy(&half, &value, 2); return half;
}
static unsigned short narrowed_half(float value) {
    _Float16 half = value; unsigned short bits; memcpy(&bits, &half, 2); return bits;
}
"""
AFTER = """
typedef void Kernel(const void*, const void*, void*, int, int, int, int);
extern "C" void launch(void* kernel, int blocks, int threads, const void* rows, const void* own,
                       void* out, int numel, int size, int own_rank, int multiply) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            ((Kernel*)kernel)(rows, own, out, numel, size, own_rank, multiply);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, compiled by g++."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(f"#define PLACES {PLACES}\n{BEFORE}{SOURCE}{AFTER}")
    made = folder / "kernel.so"
    words = ["g++", "-O1", "-shared", "-fPIC", "-o", str(made), str(folder / "kernel.cpp")]
    subprocess.run(words, check=True, timeout=60)
    return ctypes.CDLL(str(made))


@pytest.fixture
def kernels(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> CombineKernels:
    """The product's own launches of them."""

    def compiled(source: str, name: str):
        assert SOURCE in source

        def launch(*, grid: tuple[int, ...], block: tuple[int, ...], args: list) -> None:
            tensors = [ctypes.c_void_p(one.data_ptr()) for one in args[:3]]
            kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            library.launch(kernel, grid[0], block[0], *tensors, *args[3:])

        return launch

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compiled)
    return CombineKernels(members=2)


def terms(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose sums are rounded at every term, with signed zeros, infinities and tiny numbers."""
    generator = torch.Generator().manual_seed(1000 * size + numel)
    scale = torch.randn(size, numel, generator=generator, dtype=torch.float64).mul(3).exp()
    rows = torch.randn(size, numel, generator=generator, dtype=torch.float64).mul(scale)
    special = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 8])
    rows[:, : special.numel()] = special[:numel]
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_widths_have_the_bits_of_the_loop(kernels: CombineKernels, dtype: torch.dtype) -> None:
    for size, numel, multiply in product(range(2, 10), (1, THREADS, 2500), (False, True)):
        rows = terms(size, numel, dtype)
        for own_rank in range(size):
            own = rows[own_rank].clone()
            arrived = rows.clone()
            arrived[own_rank] = float("nan")
            wanted, found = torch.empty_like(own), own.clone()
            combine_in_a_loop(arrived.clone(), own, wanted, own_rank, multiply)
            # As in an all-reduce, where the sum takes the place of the own term.
            kernels(arrived, found, found, own_rank, multiply)
            assert same_bits(found, wanted), (size, numel, own_rank, multiply)


def test_the_order_of_the_ranks_is_seen(kernels: CombineKernels) -> None:
    rows = terms(4, 1000, torch.float32)
    sums = []
    for order in (rows, rows.flip(0)):
        sums.append(torch.empty(1000))
        kernels(order.clone(), order[0].clone(), sums[-1], 0, False)
    assert not same_bits(*sums)


@pytest.mark.parametrize(("members", "dtype"), [(9, torch.complex64), (7, torch.float32)])
def test_other_floats_and_few_rows_are_added_in_a_loop(
    monkeypatch: pytest.MonkeyPatch, members: int, dtype: torch.dtype
) -> None:
    """Nothing is compiled for them, nor can be here."""
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    rows, found = torch.ones(members, 4, dtype=dtype), torch.empty(4, dtype=dtype)
    CombineKernels()(rows, rows[1].clone(), found, 1, False)
    assert found.tolist() == [members] * 4
