"""The description of the machine: processors, memory, GPUs, and the versions of what runs."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes

PACKAGES = ("torch", "megatron-core", "deepspeed", "transformer-engine", "apex", "numpy", "triton")


def describe(device: Device, notes: Notes) -> None:
    """Say what is here; checks only that torch computes."""
    memory = psutil.virtual_memory()
    notes.say(
        f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPU cores"
        f" ({len(os.sched_getaffinity(0))} ours), {memory.total / 2**30:.0f} GiB of memory"
    )
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    notes.say(f"/dev/shm: {shared:.1f} GiB free; interpreter {sys.executable}")
    versions = {name: _version(name) for name in PACKAGES}
    notes.figure("versions", versions)
    notes.say(", ".join(f"{name} {one or 'not installed'}" for name, one in versions.items()))
    nccl = torch.distributed.is_nccl_available()
    notes.say(f"torch is built with CUDA {torch.version.cuda or 'not'}, NCCL {_nccl(nccl)}")
    notes.figure("gpus", [_gpu(number, notes) for number in range(torch.cuda.device_count())])
    notes.check("torch adds", bool(torch.ones(2).sum() == 2))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _nccl(is_there: bool) -> str:
    if not is_there:
        return "not"
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, found))


def _gpu(number: int, notes: Notes) -> dict[str, object]:
    """The properties of one GPU, which a line names as well."""
    found = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    notes.say(
        f"GPU {number}: {found.name}, compute capability {found.major}.{found.minor},"
        f" {found.multi_processor_count} multiprocessors, {free / 2**30:.1f} of"
        f" {total / 2**30:.1f} GiB free"
    )
    peers = [
        other
        for other in range(torch.cuda.device_count())
        if other != number and torch.cuda.can_device_access_peer(number, other)
    ]
    notes.say(f"GPU {number} reaches the memory of GPUs {peers or 'none'}")
    return {"name": found.name, "free_bytes": free, "total_bytes": total, "peers": peers}
