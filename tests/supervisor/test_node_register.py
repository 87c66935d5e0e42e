"""The promises of a node, in memory that its supervisors share and that ends with them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import pytest

from elaswave_plugin.core.agreement.acceptor_state import NodeMemory
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import Ballot, Prepare, Proposal
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import first_view
from elaswave_plugin.errors import AgreementError
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.supervisor.peers import node_register
from elaswave_plugin.supervisor.peers.node_register import REGISTER, NodeRegister
from elaswave_plugin.supervisor.snapshot_server import SnapshotServer
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore

NODES = (0, 1, 2, 2)
FORK = multiprocessing.get_context("fork")
HOST, SECRET = "127.0.0.1", Secret.new()
LONG_S = 10.0
WAIT_S = 1.0


def turn(
    register: NodeRegister,
    agreement: Agreement,
    *,
    limit_s: float = LONG_S,
    on_stuck: Callable[[int], None] = lambda pid: None,
) -> AbstractContextManager[None]:
    return register.turn(agreement, limit_s=limit_s, on_stuck=on_stuck)


def supervisor(slot: int) -> Agreement:
    return Agreement(slot=slot, nodes=NODES, timeouts=Timeouts())


def ballot(term: int, leader: int) -> Ballot:
    return Ballot(term=term, leader=leader, epoch=term)


@pytest.fixture
def register() -> Iterator[NodeRegister]:
    with closing(NodeRegister.create()) as register:
        yield register


def test_what_one_supervisor_promises_the_other_one_recalls(register: NodeRegister) -> None:
    with closing(NodeRegister(os.dup(register._fd))) as beside:
        one, other = supervisor(2), supervisor(3)
        one.lost(0, "its connection closed")
        with turn(register, one):
            one.receive(1, Prepare(ballot=ballot(4, 1), epoch=0, lost=(0,)), 0.0)
        with turn(beside, other):
            assert other.memory.promised == ballot(4, 1)


def test_what_is_accepted_is_kept_whole_however_often_it_changes(register: NodeRegister) -> None:
    with closing(NodeRegister(os.dup(register._fd))) as beside:
        for epoch in range(1, 200):
            one, other = supervisor(2), supervisor(3)
            # Records get longer and shorter again, and take each other's place.
            view = first_view(NODES * (1 + epoch % 7 * epoch % 5))
            proposal = Proposal(ballot=ballot(epoch, 0), view=view)
            with turn(register, one):
                before = (first_view(NODES),) * epoch
                one.memory = one.memory.accepting(proposal, before, known_epoch=0)
            with turn(beside, other):
                assert other.memory == one.memory
        assert os.fstat(register._fd).st_size < 1 << 18


def test_who_is_killed_while_it_writes_leaves_what_was_there(
    register: NodeRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervisor(2)
    with turn(register, one):
        one.memory = one.memory.promising(ballot(4, 1))
    whole, write = one.memory, os.pwrite

    def killed(fd: int, data: bytes, at: int) -> int:
        write(fd, data[: len(data) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def promise() -> None:
        monkeypatch.setattr(node_register.os, "pwrite", killed)
        with turn(register, one):
            one.memory = one.memory.promising(ballot(5, 1))

    process = FORK.Process(target=promise)
    process.start()
    process.join(LONG_S)
    assert process.exitcode == -signal.SIGKILL
    with closing(NodeRegister(os.dup(register._fd))) as beside:
        other = supervisor(3)
        with turn(beside, other):
            assert other.memory == whole


def hold(register: NodeRegister, holds: Event, *, stops: bool) -> None:
    with turn(register, supervisor(3)):
        holds.set()
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()


@pytest.fixture
def holder(register: NodeRegister) -> Iterator[Callable[..., BaseProcess]]:
    """Starts another process and waits until it has its turn, in which it stays."""
    with ExitStack() as stack:

        def start(*, stops: bool) -> BaseProcess:
            holds = FORK.Event()
            process = FORK.Process(target=hold, args=(register, holds), kwargs={"stops": stops})
            process.start()
            stack.callback(process.join, LONG_S)
            stack.callback(process.kill)
            assert holds.wait(LONG_S)
            return process

        yield start


@pytest.mark.parametrize("stops", [False, True])
def test_who_does_not_end_its_turn_is_told_of_and_ended(
    register: NodeRegister, holder: Callable[..., BaseProcess], stops: bool
) -> None:
    process = holder(stops=stops)
    stuck = []

    def end(pid: int) -> None:
        stuck.append(pid)
        os.kill(pid, signal.SIGKILL)

    with turn(register, supervisor(2), limit_s=0.2, on_stuck=end):
        pass  # the lock has gone with it
    assert stuck == [process.pid]


def test_a_turn_is_not_waited_for_without_end(
    register: NodeRegister, holder: Callable[..., BaseProcess]
) -> None:
    process = holder(stops=False)
    stuck: list[int] = []
    with (
        pytest.raises(AgreementError, match=f"process {process.pid}, .* at its vote for 0.4 s"),
        turn(register, supervisor(2), limit_s=0.2, on_stuck=stuck.append),
    ):
        pass
    assert stuck == [process.pid]


def wait_for_it(register: NodeRegister, found: Connection) -> None:
    stuck: list[int] = []
    found.send("waits")
    with turn(register, supervisor(3), limit_s=WAIT_S, on_stuck=stuck.append):
        found.send(stuck)


def test_that_it_was_stopped_itself_is_nobody_elses_fault(register: NodeRegister) -> None:
    """A job that is stopped as a whole goes on as it was, whoever is continued first."""
    found, theirs = FORK.Pipe(duplex=False)
    waiter = FORK.Process(target=wait_for_it, args=(register, theirs))
    with turn(register, supervisor(2)):
        waiter.start()
        assert found.poll(LONG_S) and found.recv() == "waits"
        assert waiter.pid is not None
        os.kill(waiter.pid, signal.SIGSTOP)
        time.sleep(1.5 * WAIT_S)
        os.kill(waiter.pid, signal.SIGCONT)
        assert not found.poll(WAIT_S / 4)  # it waits on
    assert found.poll(LONG_S) and found.recv() == []
    waiter.join(LONG_S)


@pytest.fixture
def server(register: NodeRegister) -> Iterator[SnapshotServer]:
    """The server of the supervisor that has the register."""
    store = SnapshotStore(0)
    takers = {REGISTER: register.hand}
    with closing(store), closing(SnapshotServer(store, HOST, None, takers, secret=SECRET)) as one:
        one.start()
        yield one


def test_a_supervisor_is_handed_the_memory_of_its_node(
    register: NodeRegister, server: SnapshotServer
) -> None:
    before = set(os.listdir("/dev/shm"))
    with closing(NodeRegister.create()) as own:
        own.take_from(server.address, SECRET)
        one, other = supervisor(2), supervisor(3)
        with turn(register, one):
            one.memory = one.memory.promising(ballot(4, 1))
        with turn(own, other):
            assert other.memory.promised == ballot(4, 1)
        assert not os.get_inheritable(own._fd)
    assert set(os.listdir("/dev/shm")) == before


def test_a_stranger_is_handed_nothing(server: SnapshotServer) -> None:
    with closing(NodeRegister.create()) as own:
        with pytest.raises(AgreementError, match="it cannot be asked for them here"):
            own.take_from(server.address, Secret.new())
        with turn(own, supervisor(2)):
            pass  # its own is still there


def test_a_supervisor_that_is_gone_hands_nothing(register: NodeRegister) -> None:
    with pytest.raises(AgreementError, match=r"it cannot be asked for them here: .*refused"):
        register.take_from("127.0.0.1:1", SECRET)


def test_who_remembers_less_learns_and_forgets_nothing() -> None:
    low = NodeMemory().promising(ballot(2, 0))
    view = first_view(NODES)
    high = low.accepting(Proposal(ballot=ballot(3, 1), view=view), (view,), known_epoch=0)
    assert low.joined(high) is high
    assert high.joined(low) is high
    later = low.promising(ballot(9, 2))
    for both in (high.joined(later), later.joined(high)):
        assert (both.promised, both.accepted) == (later.promised, high.accepted)
