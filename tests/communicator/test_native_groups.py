"""Native groups under elastic ones, in real processes: gloo on CPU tensors in the place of NCCL."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from elaswave_plugin.communicator.device import nccl
from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from elaswave_plugin.communicator.device.ordered_sums import combine_in_a_loop
from elaswave_plugin.communicator.groups import group_calls
from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.core.layout.group_rules import GroupEdit
from elaswave_plugin.errors import ConfigurationError, EpochChanged
from tests.communicator.forked import Peer, Workers
from tests.communicator.native_groups import GlooMaker
from tests.job_secret import SECRET


def _native(peer: Peer) -> GlooMaker:
    """Groups with gloo below, over the whole world."""
    maker = GlooMaker()
    peer.groups = GroupTable(peer.links, maker=maker)
    peer.install()
    assert type(dist.group.WORLD) is DeviceProcessGroup
    assert maker.made == []
    return maker


def _neighbours(group: Any) -> None:
    rank, size = group.rank(), group.size()
    got = torch.zeros(4)
    operations = [
        dist.P2POp(
            dist.isend, torch.full((4,), float(rank)), group=group, group_peer=(rank + 1) % size
        ),
        dist.P2POp(dist.irecv, got, group=group, group_peer=(rank - 1) % size),
    ]
    (work,) = dist.batch_isend_irecv(operations)
    work.wait()
    assert torch.all(got == (rank - 1) % size)


def _calls(peer: Peer) -> None:
    maker = _native(peer)
    rank, world = peer.slot, dist.group.WORLD
    data = torch.full((5,), float(rank))
    dist.all_reduce(data)
    assert data.tolist() == [3.0] * 5
    work = dist.all_reduce(data, async_op=True)
    assert work is not None and work.wait() and work.is_success()
    dist.broadcast(data, 1)
    parts = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == [0.0, 1.0, 2.0]
    whole = torch.zeros(6)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    assert whole.tolist() == [0, 0, 1, 1, 2, 2]
    outs = [torch.zeros(1) for _ in range(3)] if rank == 2 else None
    dist.gather(torch.full((1,), float(rank)), outs, dst=2)
    assert outs is None or [out.item() for out in outs] == [0.0, 1.0, 2.0]
    if rank < 2:
        one = torch.full((3,), float(rank))
        dist.send(one, 1) if rank == 0 else dist.recv(one, 0)
        assert torch.all(one == 0.0)
    total = funcol.all_reduce(torch.ones(6), "sum", world)
    assert torch.all(funcol.wait_tensor(total) == 3.0)
    _neighbours(world)
    pieces = [torch.ones(2), torch.ones(3)]
    with coalescing(device=torch.device("cpu")):
        for piece in pieces:
            dist.all_reduce(piece)
    assert all(torch.all(piece == 3.0) for piece in pieces)
    gathered: list[object] = [None] * 3
    dist.all_gather_object(gathered, {"slot": rank})
    assert gathered == [{"slot": 0}, {"slot": 1}, {"slot": 2}]
    dist.barrier()
    assert maker.made == ["0@1"]


def test_the_calls_of_torch_reach_the_native_group() -> None:
    with Workers(3, _calls) as workers:
        workers.commit(1, range(3))
        workers.join()


def _recover(peer: Peer) -> None:
    """As a worker does: the commit hands everybody's facts to everybody."""
    before = set(peer.groups.world.members) if peer.groups.world else set()
    peer.tell(peer.groups.device_facts())
    ranks = peer.open()
    peer.groups.edit_all(ranks, before - set(ranks))
    peer.groups.settle(peer.hear())


def _lossy(peer: Peer) -> None:
    maker = _native(peer)
    pair = peer.groups.create("pair", (0, 1) if peer.slot < 2 else (2, 3))
    pair.allreduce([torch.ones(1)]).wait()
    dist.all_reduce(torch.ones(1))
    assert maker.made == ["pair@1", "0@1"]
    dist.barrier()
    peer.tell("ready")
    if peer.slot == 3:
        peer.hear()
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert work is not None
    peer.tell("in")
    with pytest.raises(EpochChanged, match="slot 3 is gone"):
        work.wait()
    _recover(peer)
    for _ in range(2):
        data = torch.ones(3)
        dist.all_reduce(data)
        assert torch.all(data == 3.0)
        data = torch.ones(3)
        pair.allreduce([data]).wait()
        assert torch.all(data == (2.0 if peer.slot < 2 else 1.0))
    _neighbours(dist.group.WORLD)
    kept = ["pair@1", "0@1", "0@2"]
    assert maker.made == (kept if peer.slot < 2 else [*kept, "pair@2"])


def test_a_loss_replaces_the_groups_of_the_victim_and_keeps_the_others() -> None:
    """Slot 3 dies while the others are blocked in gloo, which cannot be told."""
    with Workers(4, _lossy) as workers:
        workers.commit(1, range(4))
        workers.hear_all()
        survivors = (0, 1, 2)
        assert [workers.hear(slot) for slot in survivors] == ["in"] * 3
        workers.stop(3)  # silent: nothing but the doorbell can leave the wait
        workers.interrupt(2, survivors, "slot 3 is gone")
        facts = {slot: workers.hear(slot) for slot in survivors}
        assert [sorted(facts[slot]) for slot in survivors] == [["pair@1"]] * 3
        workers.commit(2, survivors)
        for slot in survivors:
            workers.tell(slot, facts)
        workers.kill(3)
        workers.join()


def _named_apart(peer: Peer) -> None:
    maker = _native(peer)
    ours = (0, 1) if peer.slot < 2 else (2, 3)
    group = peer.groups.create("upper" if peer.slot < 2 else "lower", ours)
    data = torch.ones(1)
    group.allreduce([data]).wait()
    met = []
    for identity in ("a", "b"):
        peer.tell(peer.groups.device_facts())
        ranks = peer.open()
        edit = GroupEdit(tuple(reversed(ranks)), identity)
        peer.groups.edit_groups(ranks, {group.group_name: edit})
        peer.groups.settle(peer.hear())
        data = torch.full((1,), float(peer.slot))
        group.allreduce([data]).wait(timedelta(seconds=10))
        met.append(data.item())
    peer.tell((met, maker.made))


def test_members_with_different_names_for_a_group_meet_in_it() -> None:
    """Of two groups one member each is left, and these make one group from then on."""
    survivors = (1, 2)
    with Workers(4, _named_apart) as workers:
        workers.commit(1, range(4))
        for epoch in (2, 3):
            facts = {slot: workers.hear(slot) for slot in (range(4) if epoch == 2 else survivors)}
            workers.interrupt(epoch, survivors, "slots 0 and 3 are gone")
            workers.commit(epoch, survivors)
            for slot in survivors:
                workers.tell(slot, {slot: facts[slot] for slot in survivors})
        answers = [workers.hear(slot) for slot in survivors]
        for slot in (0, 3):
            workers.kill(slot)
        workers.join()
    # The second change renames the group only: what both hold for it is kept.
    assert answers == [([3.0, 3.0], ["upper@1", "a@2"]), ([3.0, 3.0], ["lower@1", "a@2"])]


def _by_tag(peer: Peer) -> None:
    maker = _native(peer)
    world, other = dist.group.WORLD, 1 - peer.slot
    spaces = {tag: torch.zeros(tag) for tag in (1, 2, 3)}
    # Everybody takes before it sends, and in another order than the other one sends.
    arriving = [
        group_calls.receive(spaces[tag], world, rank=other, tag=tag)
        for tag in (sorted(spaces) if peer.slot else (3, 1, 2))
    ]
    sent = [
        group_calls.send(torch.full((tag,), float(tag)), world, rank=other, tag=tag)
        for tag in (2, 3, 1)
    ]
    assert all(torch.all(one.wait() == len(one.wait())) for one in arriving)
    for work in sent:
        work.wait()
    assert maker.made == []


def test_messages_by_tag_stay_on_the_links() -> None:
    with Workers(2, _by_tag) as workers:
        workers.commit(1, (0, 1))
        workers.join()


# ---- the choice ----------------------------------------------------------------------------------


class _NoMaker:
    """Stands for NcclMaker where there is no NCCL to ask for its version."""

    device_type = "cuda"
    combine = staticmethod(combine_in_a_loop)
    shrinks = False
    overridden = ("X is 0 instead of 1",)

    def __init__(self, environ: object, devices: dict[int, str]) -> None:
        self.devices = devices


def _choosing(peer: Peer) -> None:
    setting, device, available = peer.hear()
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "is_nccl_available", lambda: available)
    patch.setattr(nccl, "local_device", lambda: device)
    patch.setattr(nccl, "NcclMaker", _NoMaker)
    said: list[str] = []
    patch.setattr(nccl, "print", lambda text, **_: said.append(text), raising=False)
    peer.groups = GroupTable(peer.links, gpu_engine=setting)
    try:
        peer.install()
        data = torch.ones(2)
        dist.all_reduce(data)
        peer.tell((type(dist.group.WORLD).__name__, said))
    except ConfigurationError as error:
        peer.tell((str(error), said))


def _choices(setting: str, devices: tuple[str, str], available: bool = True) -> list[Any]:
    with Workers(2, _choosing) as workers:
        for slot in (0, 1):
            workers.tell(slot, (setting, devices[slot], available))
        workers.commit(1, (0, 1))
        answers = [workers.hear(slot) for slot in (0, 1)]
        workers.join()
    return answers


def test_one_gpu_per_worker_chooses_nccl_and_says_so_once() -> None:
    name = DeviceProcessGroup.__name__
    said = ["elaswave: GPU tensors go through NCCL; X is 0 instead of 1"]
    assert _choices("auto", ("GPU-a", "GPU-b")) == [(name, said), (name, [])]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (("GPU-a", "GPU-a"), "slots [0, 1] share the device GPU-a"),
        (("GPU-a", ""), "slots [1] have no CUDA device with NCCL"),
    ],
)
def test_otherwise_host_memory_and_the_reason_is_said_once(
    devices: tuple[str, str], reason: str
) -> None:
    first, second = _choices("auto", devices)
    name = ElasticProcessGroup.__name__
    assert (first[0], second) == (name, (name, []))
    (said,) = first[1]
    assert said.startswith(f"elaswave: GPU tensors go through host memory: {reason}")
    for error, _ in _choices("nccl", devices):
        assert error.startswith(f"gpu_engine is nccl, but {reason}")


def test_the_setting_host_and_a_torch_without_nccl_ask_nobody() -> None:
    name = ElasticProcessGroup.__name__
    assert _choices("host", ("GPU-a", "GPU-b")) == [(name, [])] * 2
    assert _choices("auto", ("", ""), available=False) == [(name, [])] * 2
    for error, _ in _choices("nccl", ("", ""), available=False):
        assert "this torch is built without NCCL" in error


JOB = {0: "GPU-a", 1: "GPU-b"}


def _choice_alone(
    patch: pytest.MonkeyPatch,
    device: str,
    *,
    job: dict[int, str] = JOB,
    setting: str = "auto",
    available: bool = True,
) -> Any:
    """Return the choice of slot 1, which builds beside the job and asks no other."""
    links = LinkTable(1, secret=SECRET)
    links.detached = True
    patch.setattr(dist, "is_nccl_available", lambda: available)
    patch.setattr(nccl, "local_device", lambda: device)
    patch.setattr(nccl, "NcclMaker", _NoMaker)
    try:
        return nccl.maker_for(links, (0, 1), setting, {}, timeout_s=1.0, launched_on=job)
    finally:
        links.close()


def test_who_comes_back_takes_what_the_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("GPU-b", "another one"):
        assert type(_choice_alone(monkeypatch, device)) is _NoMaker
    assert _choice_alone(monkeypatch, "GPU-b", job={}) is None
    assert _choice_alone(monkeypatch, "GPU-b", setting="host") is None


@pytest.mark.parametrize(
    ("device", "available", "reason"),
    [
        ("GPU-a", True, r"worker 1 cannot take part: slots \[0, 1\] share the device GPU-a"),
        ("", True, r"worker 1 cannot take part: slots \[1\] have no CUDA device"),
        ("GPU-b", False, "this worker's torch is built without it"),
    ],
)
def test_who_comes_back_and_cannot_take_part_is_refused_before_it_enters(
    monkeypatch: pytest.MonkeyPatch, device: str, available: bool, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        _choice_alone(monkeypatch, device, available=available)
