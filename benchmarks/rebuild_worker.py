"""Worker of `python -m benchmarks.communicator`: loses one worker a run, in three ways of going on.

rebuild_worker.py OUT STORE_PORT departures|kill RUNS TP,PP,DP
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.bench_member import BenchMember
from benchmarks.group_list import Layout
from benchmarks.native_groups import NativeGroups, await_end_of_threads, verify

WARM_UP = 200
KILL_NUMEL = 1 << 18
"""Elements of the all-reduce in the middle of which a worker is killed (1 MiB)."""


def remaining(
    groups: dict[str, tuple[int, ...]], live: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the groups without the workers that have gone; a group of one is none."""
    left = {name: tuple(s for s in slots if s in live) for name, slots in groups.items()}
    return {name: slots for name, slots in left.items() if len(slots) > 1}


def resources() -> dict[str, int]:
    """Count what this process holds now."""
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "private_bytes": process.memory_full_info().uss,
    }


class Departures:
    """One loss after the other; each is measured with gloo, by rebuilding, and with ours."""

    def __init__(self, member: BenchMember, store: Any, layout: Layout) -> None:
        self._member = member
        self._native = NativeGroups(store, member.slot)
        self._all_groups = layout.groups()

    def run(self, number: int, victim: int) -> None:
        """Measure the loss of `victim`, which leaves for good at the end."""
        live = tuple(sorted(self._member.view.ranks))
        groups = remaining(self._all_groups, live)
        self._rebuild(number, victim, live, groups)
        # Each wakes a hundred times a second, which would be charged to the edit.
        await_end_of_threads()
        self._edit(number, victim, groups)

    def _rebuild(
        self,
        number: int,
        victim: int,
        live: tuple[int, ...],
        groups: dict[str, tuple[int, ...]],
    ) -> None:
        member, native = self._member, self._native
        survivors = tuple(slot for slot in live if slot != victim)
        after = remaining(groups, survivors)
        is_victim = member.slot == victim

        self._native_resources(number, live, groups)
        native.wait_for(f"{number}/full", len(live))
        if not is_victim:
            made_s, verify_s = native.rebuild_all(f"{number}/b", survivors, after)
            member.write(what="full", run=number, made_s=made_s, verify_s=verify_s)
        dist.destroy_process_group()
        native.wait_for(f"{number}/full done", len(live))

        own = native.make(f"{number}/c", live, groups)
        verify(own)
        native.wait_for(f"{number}/partial", len(live))
        if not is_victim:
            self._partial(number, victim, own, groups, after, survivors)
        dist.destroy_process_group()
        native.wait_for(f"{number}/partial done", len(live))

    def _native_resources(
        self, number: int, live: tuple[int, ...], groups: dict[str, tuple[int, ...]]
    ) -> None:
        before = resources()
        verify(self._native.make(f"{number}/a", live, groups))
        self._member.write(what="gloo resources", run=number, before=before, after=resources())

    def _partial(
        self,
        number: int,
        victim: int,
        own: list[Any],
        groups: dict[str, tuple[int, ...]],
        after: dict[str, tuple[int, ...]],
        survivors: tuple[int, ...],
    ) -> None:
        mine = [name for name, slots in groups.items() if self._member.slot in slots]
        handles = dict(zip(mine, own[1:], strict=True))
        touched = {"world": survivors}
        touched |= {name: after[name] for name in after if victim in groups[name]}
        untouched = [handles[name] for name in mine if victim not in groups[name]]
        made_s, verify_s = self._native.rebuild_touched(f"{number}/p", touched, untouched)
        self._member.write(what="partial", run=number, made_s=made_s, verify_s=verify_s)

    def _edit(self, number: int, victim: int, groups: dict[str, tuple[int, ...]]) -> None:
        member, native, live = self._member, self._native, len(self._member.view.ranks)
        before = resources()
        own = member.install(groups)
        verify(own)
        if number == 0:
            member.write(what="elastic resources", run=0, before=before, after=resources())
        gc.collect()
        if member.slot == victim:
            native.wait_for(f"{number}/edit", live)
            member.leave()
        gone = member.view.ranks.index(victim)
        native.arrive(f"{number}/edit", live)
        busy_s = time.process_time()
        member.wait_for_change(lambda: dist.recv(torch.ones(1), gone))
        member.follow()
        made_at_s, busy_s = time.monotonic(), time.process_time() - busy_s
        native.wait_for(f"{number}/edited", live - 1)
        verify_s = verify(own)
        figures = {"made_at_s": made_at_s, "busy_s": busy_s, "verify_s": verify_s}
        member.write(what="edit", run=number, victim=victim, **figures)
        member.uninstall()


def kill(member: BenchMember, layout: Layout, victim: int) -> None:
    """SIGKILL in the middle of an all-reduce, until every group of every survivor is verified."""
    own = member.install(layout.groups())
    verify(own)
    for _ in range(WARM_UP):
        dist.all_reduce(torch.ones(KILL_NUMEL))
    if member.slot == victim:
        work = dist.all_reduce(torch.ones(KILL_NUMEL), async_op=True)
        member.write(what="killed", at_s=time.monotonic(), in_flight=not work.is_completed())
        os.kill(os.getpid(), signal.SIGKILL)
    member.wait_for_change(lambda: dist.all_reduce(torch.ones(KILL_NUMEL)))
    member.follow()
    verify(own)
    member.write(what="verified", at_s=time.monotonic())


def main(arguments: list[str]) -> None:
    """Run one of the two measurements."""
    out, port, mode, runs, sizes = arguments
    torch.set_num_threads(1)
    tp, pp, dp = map(int, sizes.split(","))
    layout = Layout(tp=tp, pp=pp, dp=dp)
    member = BenchMember(Path(out))
    first_victim = layout.world // 2 + 1
    if mode == "kill":
        kill(member, layout, first_victim)
    else:
        departures = Departures(member, member.store(int(port)), layout)
        for number in range(int(runs)):
            departures.run(number, (first_victim + number) % layout.world)
    member.member.finish()
    member.links.close()


if __name__ == "__main__":
    main(sys.argv[1:])
