"""Seals of a worker's shard: bytes a second from the device, and share of a step of its size."""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes
from elaswave_plugin.snapshot.host_copies import HostCopies, PinnedBlocks
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool, VerifiedReader, capacity_of

GIB = 1 << 30
SIZES_BYTES = (1 * GIB, 4 * GIB, 16 * GIB)
SMALL_SIZES_BYTES = (4 << 20, 16 << 20)
# Of a parameter: a master weight and two moments in float32.
BYTES_A_PARAMETER = 12
WIDTH, TOKENS = 4096, 8192
SMALL_WIDTH, SMALL_TOKENS = 256, 256
REPEATS = 3
REFUSED_BYTES = 8 << 20


def measure(device: Device, notes: Notes) -> None:
    """Seal shards of three sizes, read one back, and time a step of as many parameters."""
    if not device.is_stand_in:
        _copy_to_refused_memory(notes)
    for size in SMALL_SIZES_BYTES if device.is_stand_in else SIZES_BYTES:
        name = f"{size / GIB:g} GiB" if size >= GIB else f"{size >> 20} MiB"
        lacking = _lacking(device, size)
        if lacking:
            notes.say(f"{name} a worker: not run, {lacking}")
            continue
        seal_s = _seal_s(device, notes, name, size)
        step_s = _step_s(device, size // BYTES_A_PARAMETER)
        notes.figure(name, {"seal_s": seal_s, "step_s": step_s})
        notes.say(
            f"{name} a worker: sealed in {seal_s:.3f} s ({size / seal_s / 1e9:.2f} GB/s), which is"
            f" {100 * seal_s / step_s:.0f} % of a step of {step_s:.3f} s"
            f" ({size // BYTES_A_PARAMETER / 1e6:.0f} M parameters, {_tokens(device)} tokens)"
        )


def _copy_to_refused_memory(notes: Notes) -> None:
    """Memory that CUDA does not pin is copied to all the same, and nothing else is spoiled."""
    memory = memoryview(mmap.mmap(-1, REFUSED_BYTES))
    first, second = PinnedBlocks(memory), PinnedBlocks(memory)
    first.pin(REFUSED_BYTES)
    second.pin(REFUSED_BYTES)
    notes.say(f"memory that is pinned already: {second.refused!r}")
    notes.check("CUDA refuses to pin it again", bool(second.refused) and not first.refused)
    first.free(0)
    shard = torch.randn(REFUSED_BYTES // 4, device="cuda")
    floats = np.frombuffer(memory, dtype=np.float32)
    *_, stop = HostCopies().of([shard])(floats)
    same = torch.equal(torch.from_numpy(floats), shard.cpu())
    notes.check("what is not pinned gets the bits of the device", same and stop == shard.numel())


def _tokens(device: Device) -> int:
    return SMALL_TOKENS if device.is_stand_in else TOKENS


def _lacking(device: Device, size: int) -> str:
    """Why a shard of this size does not fit, or ""."""
    free = psutil.virtual_memory().available
    if free < 2.5 * size:
        return f"two snapshots of it do not fit into {free / GIB:.1f} GiB of memory"
    if not device.is_stand_in:
        free, _ = torch.cuda.mem_get_info()
        if free < 1.5 * size:
            return f"it does not fit into {free / GIB:.1f} GiB of the device"
    return ""


@contextmanager
def _memory() -> Iterator[tuple[int, int]]:
    fds = os.memfd_create("seals-0"), os.memfd_create("seals-1")
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _seal_s(device: Device, notes: Notes, name: str, size: int) -> float:
    """Median seconds of a seal into memory that has been touched before; checks what was sealed."""
    generator = torch.Generator(device.kind).manual_seed(3)
    shard = torch.randn(size // 4, generator=generator, device=device.kind)
    capsule = b"capsule"
    with _memory() as fds:
        pool = SnapshotPool(
            fds,
            slot=0,
            capacity_bytes=capacity_of(size + len(capsule)),
            needed_bytes=2 * size,
            available_bytes=psutil.virtual_memory().available,
        )
        seconds: list[float] = []
        for step in range(2 + REPEATS):
            shard.add_(1.0)
            device.synchronize()
            began_s = time.monotonic()
            sealed = pool.begin_seal(
                step=step,
                epoch=1,
                ranks=[0],
                parts=[shard],
                capsule=capsule,
                before_seal=lambda: None,
            )()
            seconds.append(time.monotonic() - began_s)
        piece = torch.empty(min(size // 4, 1 << 20))
        reader = VerifiedReader(sealed, pool.reader(sealed.buffer))
        reader.read_ranges([(0, piece.numpy().data.cast("B"))])
        same = torch.equal(piece, shard[: piece.numel()].cpu())
        notes.check(f"{name} a worker: the seal holds the bits of the device", same)
        pool.close()
        del pool, reader
    notes.say(f"{name} a worker: the first seal of each buffer took {seconds[0]:.3f} s")
    return sorted(seconds[2:])[REPEATS // 2]


def _step_s(device: Device, parameters: int) -> float:
    """Median seconds of a forward and backward pass of square layers of that many weights."""
    width = SMALL_WIDTH if device.is_stand_in else WIDTH
    layers = max(1, parameters // width**2)
    # The same weights serve all layers: time is what is measured, and memory may be short.
    weight = torch.randn(width, width, device=device.kind, dtype=torch.bfloat16) / width**0.5
    weight.requires_grad_()
    tokens = torch.randn(_tokens(device), width, device=device.kind, dtype=torch.bfloat16)
    seconds = []
    for _ in range(1 + REPEATS):
        began_s = time.monotonic()
        hidden = tokens
        for _ in range(layers):
            hidden = torch.relu(hidden @ weight)
        hidden.float().sum().backward()  # type: ignore[no-untyped-call]
        device.synchronize()
        seconds.append(time.monotonic() - began_s)
    return sorted(seconds[1:])[REPEATS // 2]
