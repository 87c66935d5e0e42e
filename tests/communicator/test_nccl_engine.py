"""The device engine against stand-ins for NCCL: the order of calls, and real groups of gloo."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from elaswave_plugin.communicator.device import communicator, engine, nccl
from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.core.layout.group_rules import GroupEdit
from elaswave_plugin.errors import ConfigurationError, EpochChanged, LinkError
from tests.communicator.native_groups import RecordedGroup, RecordingMaker, StartDetached, reduce
from tests.job_secret import SECRET

LIMIT_S = 20.0


@pytest.fixture
def detached() -> Iterator[StartDetached]:
    one = StartDetached()
    yield one
    one.links.close()


@pytest.fixture
def blocking() -> Iterator[StartDetached]:
    """As a backend whose wait() blocks the host."""
    one = StartDetached(waits_on_host=True)
    one.maker.done = False
    yield one
    one.links.close()


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Run it beside the test; the list gets what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


# ---- first use -----------------------------------------------------------------------------------


def test_a_communicator_is_made_on_first_use_and_once(detached: StartDetached) -> None:
    group, unused = detached.group("tp", (1, 0)), detached.group("dp")
    assert detached.maker.take() == []
    reduce(group).wait()
    assert detached.maker.take() == ["make tp@1 1/2", "tp@1.allreduce", "tp@1.allreduce.wait"]
    reduce(group)
    assert detached.maker.take() == ["tp@1.allreduce"]
    assert unused.size() == 3


def test_tensors_of_other_devices_stay_on_the_links() -> None:
    one = StartDetached()
    one.maker.device_type = "cuda"
    one.table = GroupTable(one.links, maker=one.maker)
    group = one.group("tp", (0,))
    data = torch.ones(2)
    group.allreduce([data]).wait()
    group.barrier().wait()
    group._start_coalescing(torch.device("cpu"))
    group._end_coalescing(torch.device("cpu")).wait()
    assert one.maker.log == []
    one.links.close()


def test_without_an_engine_groups_are_the_plain_ones(detached: StartDetached) -> None:
    group = GroupTable(detached.links).create("tp", (0,))
    assert type(group) is ElasticProcessGroup


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("gather", ([], [torch.ones(1)])),
        ("allgather", ([[torch.ones(1)] * 3], [torch.ones(1)])),
        ("reduce_scatter_single", (torch.ones(1), torch.ones(3))),
        ("all_to_all_single", (torch.ones(3), torch.ones(3), [], [])),
        ("_allgather_base", (torch.ones(3), torch.ones(1))),
    ],
)
def test_a_call_goes_to_the_native_group_under_its_own_name(
    detached: StartDetached, call: str, args: tuple[Any, ...]
) -> None:
    getattr(detached.group("tp"), call)(*args)
    assert detached.maker.take()[1:] == [f"tp@1.{call}"]


def test_a_group_of_others_is_refused(detached: StartDetached) -> None:
    with pytest.raises(ConfigurationError, match="slot 0, which is no member"):
        reduce(detached.group("tp", (1, 2)))
    assert detached.maker.log == []


def test_who_builds_beside_the_job_answers_itself_until_it_enters() -> None:
    links, maker = LinkTable(0, secret=SECRET), RecordingMaker()
    links.detached = True
    group = GroupTable(links, maker=maker).create("dp", (0, 1, 2))
    assert isinstance(group, DeviceProcessGroup)
    device = torch.device("cpu")
    data = torch.ones(2)
    group.allreduce([data]).wait()
    assert data.tolist() == [3.0, 3.0]
    group._start_coalescing(device)
    group.allreduce([data])
    group._end_coalescing(device).wait()
    assert data.tolist() == [9.0, 9.0]
    assert not group.takes_batches_on(device)
    assert maker.log == []
    links.open_epoch(7, dict.fromkeys((0, 1, 2), links.address))
    group.allreduce([data])
    assert maker.take() == ["make dp@7 0/3", "dp@7.allreduce"]
    assert group.takes_batches_on(device)
    links.close()


# ---- what outlives a change ----------------------------------------------------------------------


def test_an_idle_communicator_with_the_same_members_is_kept(detached: StartDetached) -> None:
    group, whole = detached.group("tp", (0, 1)), detached.group("dp")
    reduce(group), reduce(whole)
    detached.maker.take()
    detached.change(2, (0, 1), {2})
    assert detached.maker.groups["dp@1"].aborted.wait(LIMIT_S)
    assert detached.maker.take() == ["dp@1.abort"]
    reduce(group), reduce(whole)
    assert detached.maker.take() == ["tp@1.allreduce", "make dp@2 0/2", "dp@2.allreduce"]
    detached.change(3, (0, 1), set())
    reduce(group)
    assert detached.maker.take() == ["tp@1.allreduce"]


@pytest.mark.parametrize(
    "other",
    [{"collectives": 9}, {"idle": False}, {"name": "tp@0"}, {"sent": {0: 1}}],
)
def test_it_is_aborted_where_another_member_differs(
    detached: StartDetached, other: dict[str, Any]
) -> None:
    group = detached.group("tp", (0, 1))
    reduce(group)
    detached.change(2, (0, 1), {2}, **other)
    reduce(group)
    assert detached.maker.log[-3:] == ["tp@1.abort", "make tp@2 0/2", "tp@2.allreduce"]


def test_nothing_is_kept_when_nobody_hands_in_the_facts(detached: StartDetached) -> None:
    group = detached.group("tp", (0, 1))
    reduce(group)
    detached.links.interrupt(2, "test")
    detached.open(2, (0, 1))
    detached.table.edit_all((0, 1), {2})
    detached.maker.take()
    reduce(group)
    assert detached.maker.take() == ["tp@1.abort", "make tp@2 0/2", "tp@2.allreduce"]


def test_what_is_in_flight_when_the_facts_are_taken_is_aborted(detached: StartDetached) -> None:
    group = detached.group("tp", (0, 1))
    reduce(group)
    detached.maker.groups["tp@1"].works[0].done = False
    assert detached.table.device_facts() == {}
    assert detached.maker.groups["tp@1"].aborted.wait(LIMIT_S)


def test_a_failed_communicator_is_aborted(detached: StartDetached) -> None:
    reduce(detached.group("tp"))
    detached.maker.groups["tp@1"].failed = True
    assert detached.table.device_facts() == {}
    assert detached.maker.groups["tp@1"].aborted.wait(LIMIT_S)


def test_a_call_without_a_work_is_followed_by_a_mark(detached: StartDetached) -> None:
    """Torch's synchronous NCCL calls run on the current stream and answer None."""
    detached.maker.runs_on_the_current_stream = True
    group = detached.group("tp")
    reduce(group).wait()
    assert detached.maker.take()[1:] == ["tp@1.allreduce", "tp@1.mark.wait"]
    assert detached.table.device_facts()["tp@1"].idle
    detached.maker.done = False
    reduce(group)
    assert detached.table.device_facts() == {}


def test_facts_count_calls_by_peer(detached: StartDetached) -> None:
    group = detached.group("pp", (1, 0, 2))
    reduce(group)
    group.send([torch.ones(1)], 2)
    group.send([torch.ones(1)], 2)
    group.recv([torch.ones(1)], 0)
    facts = detached.table.device_facts()["pp@1"]
    assert (facts.collectives, facts.sent, facts.received) == (1, {2: 2}, {1: 1})
    assert facts.idle and facts.members == (1, 0, 2)


# ---- shrinking -----------------------------------------------------------------------------------


def test_a_shrink_is_made_on_first_use_and_its_parent_aborted() -> None:
    one = StartDetached(shrinks=True)
    group = one.group("dp")
    reduce(group)
    one.maker.take()
    one.change(2, (0, 1), {2})
    assert one.maker.take() == []
    reduce(group)
    assert one.maker.groups["dp@1"].aborted.wait(LIMIT_S)
    assert one.maker.log[0] == "dp@1.shrink[2]"
    assert sorted(one.maker.take()[1:]) == ["dp@1.abort", "dp@1~.allreduce"]
    one.change(3, (0, 1), set())
    reduce(group)
    assert one.maker.take() == ["dp@1~.allreduce"]
    one.links.close()


def test_a_shrink_that_was_never_made_is_superseded() -> None:
    one = StartDetached(shrinks=True)
    group = one.group("dp")
    reduce(group)
    one.change(2, (0, 1), {2})
    one.maker.take()
    one.change(3, (0,), {1})
    reduce(group)
    assert one.maker.log[0] == "dp@1.shrink[1, 2]"
    one.links.close()


def test_the_loss_of_one_in_the_middle_is_a_shrink() -> None:
    one = StartDetached(shrinks=True)
    group = one.group("dp")
    reduce(group)
    one.change(2, (0, 2), {1})
    reduce(group)
    assert "dp@1.shrink[1]" in one.maker.log
    one.links.close()


def test_no_shrink_where_members_change_their_order() -> None:
    one = StartDetached(shrinks=True)
    one.open(2, (0, 1, 2, 3))
    group = one.group("dp", (0, 1, 2, 3))
    reduce(group)
    one.maker.take()
    one.links.interrupt(3, "test")
    answers = one.answers((0, 2, 3))
    one.open(3, (0, 2, 3))
    one.table.edit_groups((0, 2, 3), {"dp": GroupEdit((0, 3, 2))})
    one.table.settle(answers)
    assert group.members == (0, 3, 2)
    reduce(group)
    assert one.maker.take() == ["dp@2.abort", "make dp@3 0/3", "dp@3.allreduce"]
    one.links.close()


# ---- interruptions -------------------------------------------------------------------------------


def test_the_doorbell_aborts_what_is_in_flight_and_only_that(detached: StartDetached) -> None:
    busy, other, idle = (detached.group(name) for name in ("busy", "other", "idle"))
    reduce(idle)
    detached.maker.done = False
    reduce(busy), reduce(other)
    made = detached.maker.groups
    made["busy@1"].may_abort.clear()
    made["other@1"].may_abort.clear()
    detached.maker.take()
    detached.links.interrupt(2, "test")  # must not wait for the aborts, and begins both
    assert made["busy@1"].abort_began.wait(LIMIT_S)
    assert made["other@1"].abort_began.wait(LIMIT_S)
    assert detached.maker.take() == []
    made["busy@1"].may_abort.set()
    made["other@1"].may_abort.set()
    detached.open(2, (0, 1, 2))
    detached.table.settle({})
    assert sorted(detached.maker.take()) == ["busy@1.abort", "idle@1.abort", "other@1.abort"]


def test_a_doorbell_that_comes_late_does_not_touch_the_next_epoch(detached: StartDetached) -> None:
    group = detached.group("tp")
    detached.change(2, (0, 1, 2), set())
    detached.maker.done = False
    reduce(group)
    group.engine._rung(1)
    group.engine.check(group.engine._live["tp"])
    detached.links.interrupt(3, "test")
    assert detached.maker.groups["tp@2"].aborted.wait(LIMIT_S)


def test_an_interruption_leaves_a_blocked_wait(blocking: StartDetached) -> None:
    work = reduce(blocking.group("tp"))
    native = blocking.maker.groups["tp@1"]
    native.may_abort.clear()
    thread, raised = in_thread(work.wait)
    assert not raised and thread.is_alive()
    blocking.links.interrupt(2, "slot 1 is gone")
    thread.join(LIMIT_S)
    assert not thread.is_alive()  # though the abort itself still runs
    assert [type(e) for e in raised] == [EpochChanged] and "slot 1 is gone" in str(raised[0])
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), EpochChanged)
    with pytest.raises(EpochChanged):
        work.wait()
    native.may_abort.set()


def test_a_limit_ends_a_wait_with_an_error(blocking: StartDetached) -> None:
    work = reduce(blocking.group("tp"))
    with pytest.raises(LinkError, match=r"allreduce in group 'tp' .*timed out after 0.05 s"):
        work.wait(timedelta(seconds=0.05))


def test_an_interruption_leaves_a_blocked_first_call(detached: StartDetached) -> None:
    """As ncclCommInitRank, which waits for all members and fails when it is aborted."""
    entered = threading.Event()

    def blocked(native: RecordedGroup, call: str) -> None:
        entered.set()
        assert native.aborted.wait(LIMIT_S)
        raise RuntimeError("NCCL communicator was aborted")

    detached.maker.on_call = blocked
    thread, raised = in_thread(lambda: reduce(detached.group("tp")))
    assert entered.wait(LIMIT_S)
    detached.links.interrupt(2, "test")
    thread.join(LIMIT_S)
    assert [type(e) for e in raised] == [EpochChanged]
    assert str(raised[0].__cause__) == "NCCL communicator was aborted"


def test_a_call_that_crosses_the_doorbell_does_not_count(detached: StartDetached) -> None:
    detached.maker.on_call = lambda native, call: detached.links.interrupt(2, "test")
    with pytest.raises(EpochChanged):
        reduce(detached.group("tp"))
    assert detached.maker.groups["tp@1"].aborted.wait(LIMIT_S)
    with pytest.raises(EpochChanged):
        reduce(detached.group("dp"))
    assert "dp@1" not in detached.maker.groups


def test_a_call_that_the_doorbell_forestalls_is_not_counted(detached: StartDetached) -> None:
    """A small message may be sent without its receiver: one that was not taken must show."""
    group = detached.group("pp", (0, 1))
    group.recv([torch.ones(1)], 1)
    detached.links.interrupt(2, "test")
    with pytest.raises(EpochChanged):
        group.recv([torch.ones(1)], 1)
    with pytest.raises(EpochChanged):
        reduce(group)
    facts = detached.table.device_facts()["pp@1"]
    assert (facts.collectives, facts.received) == (0, {1: 1})


def late_doorbell(group: DeviceProcessGroup) -> Any:
    """The links wake a call first, which may be over when the engine looks at what is in flight."""
    return mock.patch.object(group.engine, "_rung")


def test_a_call_that_has_failed_half_way_ends_its_communicator(detached: StartDetached) -> None:
    """As ncclCommInitRank on all members, each of which has then begun one collective."""

    def cut(native: RecordedGroup, call: str) -> None:
        detached.links.interrupt(2, "test")
        raise RuntimeError("the store was interrupted")

    group = detached.group("tp", (0, 1))
    detached.maker.on_call = cut
    with late_doorbell(group), pytest.raises(EpochChanged):
        reduce(group)
    assert detached.table.device_facts() == {}
    assert detached.maker.groups["tp@1"].aborted.wait(LIMIT_S)


def test_what_was_launched_as_the_doorbell_rang_is_in_flight(detached: StartDetached) -> None:
    group = detached.group("tp", (0, 1))
    reduce(group)
    detached.maker.done = False
    detached.maker.on_call = lambda native, call: detached.links.interrupt(2, "test")
    with late_doorbell(group), pytest.raises(EpochChanged):
        reduce(group)
    assert detached.table.device_facts() == {}


def test_an_abort_waits_for_a_call_that_returns(detached: StartDetached) -> None:
    """It frees what ncclAllReduce in another thread is still using."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(native: RecordedGroup, call: str) -> None:
        entered.set()
        assert go_on.wait(LIMIT_S)
        assert not native.abort_began.is_set()
        detached.maker.log.append("returned")

    detached.maker.on_call = slow
    thread, raised = in_thread(lambda: reduce(detached.group("tp")))
    assert entered.wait(LIMIT_S)
    detached.links.interrupt(2, "test")
    assert not detached.maker.groups["tp@1"].abort_began.wait(communicator.LAUNCH_LIMIT_S / 4)
    go_on.set()
    thread.join(LIMIT_S)
    assert [type(e) for e in raised] == [EpochChanged]
    assert detached.maker.groups["tp@1"].aborted.wait(LIMIT_S)
    assert detached.maker.log[-2:] == ["returned", "tp@1.abort"]


def test_errors_of_the_backend_pass_as_they_are(detached: StartDetached) -> None:
    def broken(native: RecordedGroup, call: str) -> None:
        raise ValueError("wrong dtype")

    detached.maker.on_call = broken
    with pytest.raises(ValueError, match="wrong dtype"):
        reduce(detached.group("tp"))


def test_an_error_that_a_loss_makes_waits_for_the_doorbell(detached: StartDetached) -> None:
    """As ncclCommInitRank, whose peer is gone: its socket says so before the agents do."""
    failed = threading.Event()

    def broken(native: RecordedGroup, call: str) -> None:
        failed.set()
        raise RuntimeError("remote process exited")

    detached.maker.on_call = broken
    thread, raised = in_thread(lambda: reduce(detached.group("tp")))
    assert failed.wait(LIMIT_S)
    detached.links.interrupt(2, "slot 1 is gone")
    thread.join(LIMIT_S)
    assert [type(e) for e in raised] == [EpochChanged] and "slot 1 is gone" in str(raised[0])


def test_an_error_that_no_loss_makes_passes(
    detached: StartDetached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DOORBELL_TIMEOUT_S", 0.05)

    def broken(native: RecordedGroup, call: str) -> None:
        raise RuntimeError("out of memory")

    detached.maker.on_call = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        reduce(detached.group("tp"))


def test_an_abort_that_does_not_end_is_reported(
    blocking: StartDetached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ABORT_TIMEOUT_S", 0.05)
    reduce(blocking.group("tp"))
    native = blocking.maker.groups["tp@1"]
    native.may_abort.clear()
    with pytest.raises(LinkError, match=r"'tp@1' .* is not aborted after"):
        blocking.change(2, (0, 1), {2})
    native.may_abort.set()


# ---- the end -------------------------------------------------------------------------------------


def test_a_group_that_its_user_destroys_is_closed_in_peace_or_aborted(
    detached: StartDetached,
) -> None:
    quiet, busy = detached.group("quiet"), detached.group("busy")
    reduce(quiet)
    detached.maker.done = False
    reduce(busy)
    detached.maker.take()
    quiet.shutdown()
    assert detached.maker.take() == ["quiet@1.close"]
    busy.shutdown()
    assert detached.maker.groups["busy@1"].aborted.wait(LIMIT_S)
    assert detached.maker.take() == ["busy@1.abort"]


class RecordedBackend:
    """The calls that NcclGroup makes of ProcessGroupNCCL, recorded."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.error = SimpleNamespace(name="SUCCESS")

    def get_error(self) -> SimpleNamespace:
        return self.error

    def shrink(self, excluded: list[int], flags: int) -> "RecordedBackend":
        self.log.append(f"shrink {excluded} {flags}")
        return RecordedBackend(self.log)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.log.append(f"connect {device}")

    def abort(self) -> None:
        self.log.append("abort")

    def shutdown(self) -> None:
        self.log.append("shutdown")


def test_an_nccl_group_is_aborted_and_shrunk_through_its_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c10d_tables, "wrap_backend", lambda *args, **kwargs: None)
    log: list[str] = []
    backend = RecordedBackend(log)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    group = nccl.NcclGroup(backend, None, 0, 3)
    group.connect()
    group.shrink([2])
    group.abort()
    assert log == ["connect cuda:5", "shrink [2] 1", "abort"]
    assert not group.failed
    backend.error = SimpleNamespace(name="COMM_ERROR")
    assert group.failed


def test_the_watchdog_is_silenced_and_what_was_set_otherwise_is_named() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    assert nccl.silence_watchdog(environ) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 instead of 1"]
    assert set(environ) == set(nccl.WATCHDOG_SWITCHES) and set(environ.values()) == {"0"}
