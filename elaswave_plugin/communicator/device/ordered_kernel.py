"""Adds the rows of a chunk in rank order: a loop over the rows, or for many one kernel of a GPU.

Both round after each term, so that their bits are the same; the kernel reads each element once and
writes one for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# (rows [members, numel], own [numel], out [numel], our rank, multiply): `out`, which may be the
# memory of `own`, becomes rows[0], rows[1], ... added up, with `own` in place of our row.
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool], None]

THREADS, PLACES = 256, 4
# For fewer, the loop is faster (benchmarks/gpu/results/h100.json).
KERNEL_MEMBERS = 8
_NAMES = (
    (torch.float32, "combine_float"),
    (torch.float64, "combine_double"),
    (torch.bfloat16, "combine_bfloat16"),
    (torch.float16, "combine_half"),
)
# Sums and products of 16 bits are made in 32 and rounded to even after each term, as torch's are.
SOURCE = r"""
typedef unsigned short bits16;

static __device__ float widened_bfloat16(bits16 value) {
    return __uint_as_float((unsigned int)value << 16);
}
static __device__ bits16 narrowed_bfloat16(float value) {
    unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;
    return (bits16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static __device__ float same_float(float value) { return value; }
static __device__ double same_double(double value) { return value; }

// A thread has several places, whose reads do not wait for each other.
#define COMBINE(NAME, STORED, COMPUTED, WIDENED, NARROWED)                                    \
extern "C" __global__ void combine_##NAME(const STORED* rows, const STORED* own, STORED* out, \
                                          int numel, int size, int own_rank, int multiply) {  \
    long long first = (long long)blockIdx.x * blockDim.x * PLACES + threadIdx.x;              \
    STORED total[PLACES] = {};                                                                \
    for (int rank = 0; rank < size; ++rank) {                                                 \
        const STORED* terms = rank == own_rank ? own : rows + (long long)rank * numel;        \
        STORED term[PLACES];                                                                  \
        for (int j = 0; j < PLACES; ++j) {                                                    \
            long long place = first + (long long)j * blockDim.x;                              \
            term[j] = place < numel ? terms[place] : (STORED)0;                               \
        }                                                                                     \
        for (int j = 0; j < PLACES; ++j) {                                                    \
            COMPUTED left = WIDENED(total[j]), right = WIDENED(term[j]);                      \
            STORED both = NARROWED(multiply ? left * right : left + right);                   \
            total[j] = rank == 0 ? term[j] : both;                                            \
        }                                                                                     \
    }                                                                                         \
    for (int j = 0; j < PLACES; ++j) {                                                        \
        long long place = first + (long long)j * blockDim.x;                                  \
        if (place < numel) out[place] = total[j];                                             \
    }                                                                                         \
}

COMBINE(float, float, float, same_float, same_float)
COMBINE(double, double, double, same_double, same_double)
COMBINE(bfloat16, bits16, float, widened_bfloat16, narrowed_bfloat16)
COMBINE(half, bits16, float, widened_half, narrowed_half)
"""
_HALF = r"""
static __device__ float widened_half(unsigned short value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
static __device__ unsigned short narrowed_half(float value) {
    unsigned short narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
}
"""


def combine_in_a_loop(
    rows: torch.Tensor, own: torch.Tensor, out: torch.Tensor, own_rank: int, multiply: bool
) -> None:
    """`Combine`, one addition a row."""
    terms = list(rows.unbind())
    terms[own_rank] = own
    total, last = terms[0], len(terms) - 1
    for rank, term in enumerate(terms[1:], 1):
        # What has arrived is ours to overwrite; `own` is the caller's.
        into = term if total is own else total
        combine = torch.mul if multiply else torch.add
        total = combine(total, term, out=out if rank == last else into)


@dataclass(slots=True)
class CombineKernels:
    """`Combine` by kernels, which CUDA's compiler makes when the first sum of a kind is made."""

    members: int = KERNEL_MEMBERS
    _made: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        rows: torch.Tensor,
        own: torch.Tensor,
        out: torch.Tensor,
        own_rank: int,
        multiply: bool,
    ) -> None:
        """See `Combine`; few rows, and floats of other sizes, are added in a loop.

        So are all where this torch does not have its compiler, which is not public.
        """
        name = dict(_NAMES).get(out.dtype)
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        if name is None or len(rows) < self.members or compile_kernel is None:
            combine_in_a_loop(rows, own, out, own_rank, multiply)
            return
        if name not in self._made:
            self._made[name] = compile_kernel(f"#define PLACES {PLACES}\n{_HALF}{SOURCE}", name)
        size, numel = rows.shape
        grid = (-(-numel // (THREADS * PLACES)), 1, 1)
        arguments = [rows, own, out, numel, size, own_rank, int(multiply)]
        self._made[name](grid=grid, block=(THREADS, 1, 1), args=arguments)
