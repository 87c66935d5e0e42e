"""A restore that waits for an agent, what ends the wait, and the memory that it takes."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elaswave_plugin.core.layout.shards import MOMENTS, WEIGHTS
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, make_plan
from elaswave_plugin.core.step.dataflow import deal
from elaswave_plugin.errors import EpochChanged, SnapshotGapError
from elaswave_plugin.snapshot import restore
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool, capacity_of
from tests.agent.serving import SlotStore, serve
from tests.core.sealed import sealed
from tests.idle import Clock
from tests.job_secret import SECRET

LONG_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def record(shard: int, address: str) -> SealedShard:
    held = {"holder": 1, "holder_address": address, "is_copy": True}
    sizes = {"length": 1024, "payload_bytes": 1000, "capsule_bytes": 10}
    return sealed(shard, 4, ranks=(0, 1), shard=shard, **sizes, **held)


def access(timeout_s: float, check: Callable[[], None] = lambda: None) -> restore.Access:
    pool: Any = None  # nothing is read from own memory
    return restore.Access(slot=0, pool=pool, secret=SECRET, timeout_s=timeout_s, check=check)


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker: what all compare and tell each other is its own."""
    monkeypatch.setattr(restore, "_compare_digests", lambda plan: None)
    monkeypatch.setattr(restore, "gathered", lambda value: [value])


def plan_from(rejected: frozenset[SealedShard], inventory: list[SealedShard]) -> RecoveryPlan:
    """A plan for worker 0 alone, which has nothing."""
    shard_group = ShardGroup(ranks=(0,), units=(0,), buckets=(64,))
    return make_plan(
        epoch=2,
        reason="r",
        ranks=(0,),
        dataflow=deal(num_microbatches=2, launch_slots=(0, 1), live=(0,)),
        shard_groups=[shard_group],
        inventory=inventory,
        rejected=rejected,
    )


def test_a_proposal_ends_the_wait_for_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and never answers; the collective comparison of the plans is left out."""
    monkeypatch.setattr(restore, "_compare_digests", lambda plan: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def make(rejected: frozenset[SealedShard]) -> RecoveryPlan:
            return plan_from(rejected, [record(shard, address) for shard in range(2)])

        started_s = time.monotonic()

        def check() -> None:
            if time.monotonic() > started_s + 0.2:
                raise EpochChanged(3, "r")

        with pytest.raises(EpochChanged):
            restore.restore(access(LONG_S, check), make_plan=make)
        assert 0.2 <= time.monotonic() - started_s < LONG_S / 4


@contextmanager
def served(state: torch.Tensor, step: int) -> Iterator[SealedShard]:
    """The sealed state of worker 1, at its agent."""
    store = SlotStore(1)
    address = serve(store)
    capacity = capacity_of(4 * state.numel() + 4)
    pool = SnapshotPool(
        store.fds, slot=1, capacity_bytes=capacity, needed_bytes=0, available_bytes=0
    )
    pool.begin_seal(
        step=step, epoch=1, ranks=[1], units=[0], parts=[state], capsule=b"seed", before_seal=int
    )()
    (found,) = store.inventory(address)
    yield found
    store.close()


@pytest.mark.parametrize("older", [0, 1], ids=["of the same step", "of an older step"])
def test_one_that_answers_nothing_is_put_off_while_others_have_its_step(
    monkeypatch: pytest.MonkeyPatch, older: int
) -> None:
    """One step more is lost only where the newest one has not come within the whole time."""
    alone(monkeypatch)
    monkeypatch.setattr(restore, "_STALL_S", 0.2)
    state, limit_s = torch.arange(3 * 64, dtype=torch.float32), 1.0
    with served(state, 4) as there, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        mute = replace(there, holder_address=address, step=4 + older)

        def make(rejected: frozenset[SealedShard]) -> RecoveryPlan:
            return plan_from(rejected, [there if mute in rejected else mute])

        began_s = time.monotonic()
        restored = restore.restore(access(limit_s), make_plan=make)
        waited_s = time.monotonic() - began_s
    assert torch.equal(restored.masters[:64], state[:64])
    assert (waited_s >= limit_s) is bool(older)


def test_the_only_one_is_waited_for_as_long_as_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setattr(restore, "_STALL_S", 0.2)
    started_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        mute = [record(shard, address) for shard in range(2)]
        with pytest.raises(SnapshotGapError):
            restore.restore(access(1.0), make_plan=lambda rejected: plan_from(rejected, mute))
    assert 1.2 <= time.monotonic() - started_s < LONG_S


def test_all_that_is_waited_for_in_vain_has_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps are at silent nodes, and the one before is there."""
    alone(monkeypatch)
    monkeypatch.setattr(restore, "_STALL_S", 0.1)
    state, limit_s = torch.arange(3 * 64, dtype=torch.float32), 1.0
    with served(state, 4) as there, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        mute = [replace(there, holder_address=address, step=step) for step in (7, 6, 5)]

        def make(rejected: frozenset[SealedShard]) -> RecoveryPlan:
            first = next((one for one in mute if one not in rejected), there)
            return plan_from(rejected, [first])

        clock = Clock()
        restored = restore.restore(access(limit_s), make_plan=make)
        waited_s = time.monotonic() - clock.began_s
        clock.check(waited_s, 2 * limit_s)
    assert torch.equal(restored.masters[:64], state[:64])
    assert limit_s <= waited_s


def peak_bytes() -> int:
    """The most memory that this process has had since the last call of `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def taken_by_a_read(numel: int) -> int:
    """Memory for the weights and moments of so many elements, from the worker of a lost one."""
    store = SlotStore(1)
    address = serve(store)
    state = torch.arange(3 * numel, dtype=torch.float32)
    capacity = capacity_of(12 * numel + 4)
    pool = SnapshotPool(
        store.fds, slot=1, capacity_bytes=capacity, needed_bytes=0, available_bytes=0
    )
    pool.begin_seal(
        step=4, epoch=1, ranks=[1], units=[0], parts=[state], capsule=b"seed", before_seal=int
    )()
    plan = make_plan(
        epoch=2,
        reason="r",
        ranks=(0,),
        dataflow=deal(num_microbatches=2, launch_slots=(0, 1), live=(0,)),
        shard_groups=[ShardGroup(ranks=(0,), units=(0,), buckets=(numel,))],
        inventory=store.inventory(address),
    )
    access = restore.Access(slot=0, pool=pool, secret=SECRET, timeout_s=LONG_S)
    forget_peak()
    before = peak_bytes()
    read = [restore.read_parts(plan, parts, access)[0] for parts in (WEIGHTS, MOMENTS)]
    taken = peak_bytes() - before
    assert torch.equal(torch.cat(read).flatten(), state)
    store.close()
    return taken


def test_a_new_shard_is_read_into_as_much_memory_as_it_has() -> None:
    """That is what a job counts; in a process of its own, which has freed no memory before."""
    numel = 4 << 20
    code = f"from tests.snapshot.test_restore import *; print(taken_by_a_read({numel}))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    # Beside it, what is asked for at once.
    assert 12 * numel <= int(ended.stdout) <= 12 * numel + (4 << 20)
