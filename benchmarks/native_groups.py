"""The cost of a loss with native gloo: all groups again, or only those that held the victim."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_member import own_groups

LIMIT_S = 60.0
LOOK_INTERVAL_S = 0.001


def prefixed(prefix: str, store: Any) -> Any:
    """The store with names of its own."""
    make: Any = torch._C._distributed_c10d.PrefixStore
    return make(prefix, store)


def gloo_backend(store: Any, rank: int, size: int) -> Any:
    """Native gloo without torch's tables."""
    make: Any = torch._C._distributed_c10d.ProcessGroupGloo
    return make(store, rank, size, timedelta(seconds=LIMIT_S))


def await_end_of_threads(limit_s: float = LIMIT_S) -> None:
    """Wait until no thread of a gloo group is left. Raises TimeoutError: a group is still held."""
    deadline_s = time.monotonic() + limit_s
    while count := native_threads():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{count} threads of native groups run: somebody holds one")
        time.sleep(LOOK_INTERVAL_S)  # a thread that was joined is listed for a moment


def native_threads() -> int:
    """Threads of gloo groups in this process; a new one has its name after a moment."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text().startswith("gloo")
    return count


class NativeGroups:
    """Gloo groups of one worker, over a store that outlives every worker."""

    def __init__(self, store: Any, slot: int) -> None:
        self._store = store
        self._slot = slot
        self._made = 0

    def wait_for(self, name: str, count: int) -> None:
        """Wait asleep until ``count`` workers are here: to ask repeatedly delays the others."""
        self.arrive(name, count)
        self._store.wait([f"{name}/all"], timedelta(seconds=LIMIT_S))

    def arrive(self, name: str, count: int) -> None:
        """Be here, and go on; the last of `count` workers wakes those that wait."""
        if self._store.add(name, 1) == count:
            self._store.set(f"{name}/all", "")

    def make(self, name: str, ranks: Sequence[int], groups: dict[str, tuple[int, ...]]) -> Any:
        """WORLD over these slots and every group; returns the own ones."""
        dist.init_process_group(
            "gloo",
            store=prefixed(name, self._store),
            rank=ranks.index(self._slot),
            world_size=len(ranks),
            timeout=timedelta(seconds=LIMIT_S),
        )
        return [dist.group.WORLD, *own_groups(groups, ranks, self._slot)]

    def rebuild_all(
        self, name: str, ranks: Sequence[int], groups: dict[str, tuple[int, ...]]
    ) -> tuple[float, float]:
        """Destroy and make everything; seconds for that, and to verify every group."""
        started_s = time.monotonic()
        dist.destroy_process_group()
        own = self.make(name, ranks, groups)
        made_s = time.monotonic() - started_s
        self.wait_for(f"{name}/made", len(ranks))
        return made_s, verify(own)

    def rebuild_touched(
        self,
        name: str,
        touched: dict[str, tuple[int, ...]],
        untouched: Sequence[Any],
    ) -> tuple[float, float]:
        """Make only the `touched` groups (members without the victim), "world" among them.

        torch's new_group needs every rank of the old world, and its local synchronisation hangs in
        such layouts, so that the backends are made directly, under names of our own.
        """
        started_s = time.monotonic()
        fresh = []
        for group_name, members in touched.items():
            if self._slot in members and len(members) > 1:
                store = prefixed(f"{name}/{group_name}", self._store)
                fresh.append(gloo_backend(store, members.index(self._slot), len(members)))
        made_s = time.monotonic() - started_s
        self.wait_for(f"{name}/made", len(touched["world"]))
        started_s = time.monotonic()
        for backend in fresh:
            backend.allreduce([torch.ones(1)]).wait()
        verify(untouched)
        return made_s, time.monotonic() - started_s


def verify(groups: Sequence[Any]) -> float:
    """An all-reduce on every group; seconds. Raises RuntimeError where one is wrong."""
    started_s = time.monotonic()
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        if int(total) != dist.get_world_size(group):
            raise RuntimeError(f"an all-reduce gave {int(total)}, not {dist.get_world_size(group)}")
    return time.monotonic() - started_s
