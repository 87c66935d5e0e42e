"""Sums in rank order: the kernel has the bits of the loop, on the GPU and on the host; times."""

import time

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes
from elaswave_plugin.communicator.device.ordered_sums import (
    CHUNK_BYTES,
    Combine,
    CombineKernels,
    combine_in_a_loop,
)

MEMBERS = (3, 4, 8, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SMALL_BYTES = 1 << 16
REPEATS = 20


def compare(device: Device, notes: Notes) -> None:
    """Add a chunk's rows both ways; a stand-in has no compiler for kernels and runs the loop."""
    kernels: Combine = combine_in_a_loop if device.is_stand_in else CombineKernels(members=2)
    chunk = SMALL_BYTES if device.is_stand_in else CHUNK_BYTES
    for dtype in DTYPES:
        for members in MEMBERS:
            _compare(device, notes, kernels, dtype, members, chunk // members // dtype.itemsize)


def _compare(
    device: Device, notes: Notes, kernels: Combine, dtype: torch.dtype, members: int, numel: int
) -> None:
    generator = torch.Generator(device.kind).manual_seed(members)
    rows = torch.randn((members, numel), generator=generator, device=device.kind).to(dtype)
    own, rank, name = rows[1].clone(), 1, f"{dtype}, {members} members"
    began_s = time.monotonic()
    found = {}
    for multiply in (False, True):
        wanted, made = torch.empty_like(own), torch.empty_like(own)
        host = torch.empty_like(own, device="cpu")
        combine_in_a_loop(rows.clone(), own, wanted, rank, multiply)
        kernels(rows.clone(), own, made, rank, multiply)
        combine_in_a_loop(rows.cpu(), own.cpu(), host, rank, multiply)
        how = "product" if multiply else "sum"
        notes.check(f"{name}: the {how} has the bits of the loop", _same(made, wanted))
        notes.check(f"{name}: the {how} has the bits of the host", _same(made.cpu(), host))
    found["first_s"] = time.monotonic() - began_s
    for how, combine in (("kernel", kernels), ("loop", combine_in_a_loop)):
        found[f"{how}_s"] = _seconds(device, combine, rows, own, rank)
    notes.figure(name, found)
    notes.say(
        f"{name}, {numel} elements each: kernel {1e6 * found['kernel_s']:.0f} us,"
        f" loop {1e6 * found['loop_s']:.0f} us"
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _seconds(
    device: Device, combine: Combine, rows: torch.Tensor, own: torch.Tensor, rank: int
) -> float:
    """Seconds of a sum, of many in a row; the loop overwrites rows, which changes no time."""
    out = torch.empty_like(own)
    for _ in range(2):
        device.synchronize()
        began_s = time.monotonic()
        for _ in range(REPEATS):
            combine(rows, own, out, rank, False)
        device.synchronize()
        seconds = (time.monotonic() - began_s) / REPEATS
    return seconds
