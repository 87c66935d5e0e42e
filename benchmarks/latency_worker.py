"""Worker of `communicator.py`: collectives of the elastic groups beside native gloo.

latency_worker.py OUT STORE_PORT RUNS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_member import BenchMember
from benchmarks.native_groups import gloo_backend

SIZES_BYTES = (4 << 10, 1 << 20, 64 << 20)
LARGE_BYTES = 16 << 20
WARM_UPS = 2


def calls(world: int, size_bytes: int) -> dict[str, Callable[[Any], Any]]:
    """The timed calls; `size_bytes` is the size of the whole tensor."""
    whole = torch.zeros(size_bytes // 4)  # so that sums of sums stay finite
    piece = torch.zeros(size_bytes // 4 // world)
    return {
        "all_reduce": lambda pg: pg.allreduce([whole]),
        "reduce_scatter": lambda pg: pg.reduce_scatter_single(piece, whole),
        "all_gather": lambda pg: pg.all_gather_single(whole, piece),
    }


def native_world(store: Any, slot: int, world: int) -> Any:
    """A gloo group beside ours, without torch's tables."""
    group: Any = dist.ProcessGroup(store, slot, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo_backend(store, slot, world)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def main(arguments: list[str]) -> None:
    """Time each call on both, in turn."""
    out, port, runs = arguments
    torch.set_num_threads(1)
    member = BenchMember(Path(out))
    world = len(member.view.ranks)
    ours = member.groups.create("latency", member.view.ranks)
    gloo = native_world(member.store(int(port)), member.slot, world)
    for size_bytes in SIZES_BYTES:
        count = WARM_UPS + (int(runs) if size_bytes < LARGE_BYTES else max(3, int(runs) // 6))
        for name, call in calls(world, size_bytes).items():
            seconds: dict[str, list[float]] = {"ours": [], "gloo": []}
            for _ in range(count):
                for label, group in (("ours", ours), ("gloo", gloo)):
                    ours.barrier().wait()
                    started_s = time.perf_counter()
                    call(group).wait()
                    seconds[label].append(time.perf_counter() - started_s)
            figures = {f"{label}_s": all_s[WARM_UPS:] for label, all_s in seconds.items()}
            member.write(what="collective", op=name, bytes=size_bytes, **figures)
    ours.barrier().wait()
    member.member.finish()
    member.links.close()


if __name__ == "__main__":
    main(sys.argv[1:])
