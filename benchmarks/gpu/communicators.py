"""Native communicators after a loss: aborted, made again, timed; and ids that an abort cut off."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.errors import EpochChanged
from tests.communicator.forked import Peer, Workers
from tests.communicator.native_groups import GlooMaker

MOST_WORKERS = 4
NUMEL, SMALL_NUMEL = 1 << 24, 1 << 12
VOCABULARY = 1000
# No id: what a buffer may hold before anything has arrived in it.
GARBAGE = 1 << 40


def abort_and_make(device: Device, notes: Notes) -> None:
    """Kill the last worker while all others are in a collective with it; check who goes on."""
    count = min(device.count, MOST_WORKERS)
    for name, body in (("all-reduce", _reduces), ("broadcast of ids", _embeds)):
        with Workers(count, partial(body, device.is_stand_in)) as workers:
            workers.commit(1, range(count))
            first_s = max(workers.hear_all().values())
            survivors = tuple(range(count - 1))
            assert [workers.hear(slot) for slot in survivors] == ["in"] * len(survivors)
            # Their kernels are on the device by now, or soon are: both are aborts of a real job.
            workers.kill(count - 1)
            rung_s = time.monotonic()
            workers.interrupt(2, survivors)
            facts = {slot: workers.hear(slot) for slot in survivors}
            workers.commit(2, survivors)
            for slot in survivors:
                workers.tell(slot, facts)
            ends = [workers.hear(slot) for slot in survivors]
            workers.join()
        _tell(notes, name, first_s, rung_s, ends)


def _tell(
    notes: Notes, name: str, first_s: float, rung_s: float, ends: list[dict[str, Any]]
) -> None:
    released_s = max(one["released_s"] for one in ends) - rung_s
    again_s = max(one["again_s"] for one in ends)
    notes.say(
        f"{name}: first call {first_s:.3f} s, out of the aborted one {released_s:.3f} s after the"
        f" doorbell, aborts over and first call of the new communicator {again_s:.3f} s"
    )
    figures = {"first_s": first_s, "released_s": released_s, "again_s": again_s}
    notes.figure(name, figures)
    for what in ("interrupted", "ids are ids", "goes on"):
        found = [one[what] for one in ends if what in one]
        if found:
            notes.check(f"{name}: {what}", all(found))


def _begin(is_stand_in: bool, peer: Peer) -> torch.device:
    """Install the groups, meet all others once, and tell how long that took."""
    if is_stand_in:
        peer.groups = GroupTable(peer.links, maker=GlooMaker())
    else:
        torch.cuda.set_device(peer.slot)
        peer.groups = GroupTable(peer.links, gpu_engine="nccl")
    device = torch.device("cpu" if is_stand_in else "cuda")
    peer.install()
    began_s = time.monotonic()
    dist.all_reduce(torch.ones(1, device=device))
    _synchronize(device)
    peer.tell(time.monotonic() - began_s)
    return device


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _go_on(peer: Peer, device: torch.device, found: dict[str, Any]) -> None:
    """Settle with the other survivors, and reduce over the new communicator."""
    peer.tell(peer.groups.device_facts())
    ranks = peer.open()
    facts = peer.hear()
    began_s = time.monotonic()
    peer.groups.edit_all(ranks, {max(ranks) + 1})
    peer.groups.settle(facts)
    data = torch.ones(NUMEL if device.type == "cuda" else SMALL_NUMEL, device=device)
    dist.all_reduce(data)
    _synchronize(device)
    found["again_s"] = time.monotonic() - began_s
    found["goes on"] = bool(torch.all(data == float(len(ranks))))
    peer.tell(found)


def _interrupted(work: Any) -> bool:
    try:
        work.wait()
    except EpochChanged:
        return True
    return False


def _reduces(is_stand_in: bool, peer: Peer) -> None:
    device = _begin(is_stand_in, peer)
    if peer.slot == dist.get_world_size() - 1:
        peer.hear()
    work = dist.all_reduce(torch.ones(NUMEL, device=device), async_op=True)
    peer.tell("in")
    _synchronize(device)
    interrupted = _interrupted(work)
    _go_on(peer, device, {"released_s": time.monotonic(), "interrupted": interrupted})


def _embeds(is_stand_in: bool, peer: Peer) -> None:
    """Look up ids behind the broadcast that brings them, as tensor parallelism does."""
    device = _begin(is_stand_in, peer)
    last = dist.get_world_size() - 1
    if peer.slot == last:
        peer.hear()
    table = torch.zeros(VOCABULARY, 8, device=device)
    ids = torch.full((NUMEL if device.type == "cuda" else SMALL_NUMEL,), GARBAGE, device=device)
    work = dist.broadcast(ids, src=last, async_op=True)
    peer.tell("in")
    if device.type == "cuda":
        assert work is not None
        work.wait()  # the stream waits, and the look-up is queued behind what is aborted soon
        torch.nn.functional.embedding(ids, table)
        torch.cuda.synchronize()  # raises for ever where an id was out of range
    interrupted = _interrupted(work)
    found = {"released_s": time.monotonic(), "interrupted": interrupted}
    found["ids are ids"] = bool(torch.all((ids >= 0) & (ids < VOCABULARY)))
    _go_on(peer, device, found)
