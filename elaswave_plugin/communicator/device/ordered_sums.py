"""Sums over a native group in rank order: copies between its members, which do the adding.

A native backend adds in an order of its own, which may be another one once a loss has changed the
group's members. These sums are those of `algorithms.py` bit for bit, in the same two ways: what is
small goes from every member to every member, what is large to the owner of each piece and back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# A loop over the rows, or for many one kernel of a GPU, adds them. Both round after each term, so
# that their bits are the same; the kernel reads each element once and writes one for all rows.
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


Tensors = Sequence[torch.Tensor]

# Neither was measured on a GPU; the bits do not depend on them.
EXCHANGE_BYTES = 1 << 20
# Up to this, what arrives at one member is so little that rounds cost more than bytes.
CHUNK_BYTES = 64 << 20
# So much memory receives the terms of others, however large a tensor is.


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedSums:
    """The sums of one member, left to right over the ranks; all members make the same calls.

    `exchange(outs, ins)`: outs[r] becomes ins[our rank] of rank r, where neither is empty.
    `combine`: adds up what has arrived; `multiply`: a product in place of a sum. `average`: divide
    by the number of members at the end.
    """

    rank: int
    size: int
    exchange: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
    combine: Combine
    multiply: bool
    average: bool

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Make the tensor the sum of all members'."""
        if not tensor.numel():
            return
        flat = tensor.detach().contiguous().view(-1)
        for block in torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())):
            self._all_reduce(block)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _all_reduce(self, block: torch.Tensor) -> None:
        if block.nbytes * (self.size - 1) <= EXCHANGE_BYTES:
            self._sum([block] * self.size, block)
            return
        parts = list(block.tensor_split(self.size))
        own = parts[self.rank]
        self._sum(parts, own)
        self.exchange(self._without_own(parts), self._without_own([own] * self.size))

    def reduce_scatter(self, out: torch.Tensor, parts: Tensors) -> None:
        """Make `out` the sum of all members' parts[our rank]; it may be the memory of one."""
        flats = [part.detach().contiguous().view(-1) for part in parts]
        into = out.detach() if out.is_contiguous() else torch.empty_like(flats[self.rank])
        into = into.view(-1)
        most = max(flat.nbytes for flat in flats) * (self.size - 1)
        count = -(-most // CHUNK_BYTES)
        if not count:
            return
        chunks = zip(*(flat.tensor_split(count) for flat in flats), strict=True)
        for chunk, space in zip(chunks, into.tensor_split(count), strict=True):
            self._sum(chunk, space)
        if into.data_ptr() != out.data_ptr():
            out.detach().copy_(into.view(out.shape))

    def _sum(self, parts: Tensors, out: torch.Tensor) -> None:
        """Make `out` the sum of all members' parts[our rank]."""
        own = parts[self.rank]
        rows = own.new_empty((self.size, own.numel()))
        self.exchange(self._without_own(rows.unbind()), self._without_own(parts))
        self.combine(rows, own, out, self.rank, self.multiply)
        if self.average:
            out.div_(self.size)

    def _without_own(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the tensors, empty at the own rank, as no member sends to itself."""
        return [t[:0] if rank == self.rank else t for rank, t in enumerate(tensors)]
