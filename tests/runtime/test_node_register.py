"""What a node has promised, in memory that its supervisors share and that ends with them."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.synchronize import Event

import pytest

from elaswave_plugin.core.agreement import Agreement
from elaswave_plugin.core.agreement_messages import Ballot, Prepare, Proposal
from elaswave_plugin.core.membership import first_view
from elaswave_plugin.core.node_memory import NodeMemory
from elaswave_plugin.core.patience import Patience
from elaswave_plugin.errors import AgreementError
from elaswave_plugin.runtime import node_register
from elaswave_plugin.runtime.node_register import NodeRegister

NODES = (0, 1, 2, 2)
FORK = multiprocessing.get_context("fork")
LONG_S = 10.0


def supervisor(slot: int) -> Agreement:
    return Agreement(slot=slot, nodes=NODES, patience=Patience())


def ballot(term: int, leader: int) -> Ballot:
    return Ballot(term=term, leader=leader, epoch=term)


@pytest.fixture
def register() -> Iterator[NodeRegister]:
    with closing(NodeRegister.create()) as register:
        yield register


def test_what_one_supervisor_promises_the_other_one_recalls(register: NodeRegister) -> None:
    with closing(NodeRegister.of_process(os.getpid())) as beside:
        one, other = supervisor(2), supervisor(3)
        one.lost(0, "its connection closed")
        with register.turn(one):
            one.receive(1, Prepare(ballot=ballot(4, 1), epoch=0, lost=(0,)), 0.0)
        with beside.turn(other):
            assert other.memory.promised == ballot(4, 1)


def test_what_is_accepted_is_kept_whole_however_often_it_changes(register: NodeRegister) -> None:
    with closing(NodeRegister.of_process(os.getpid())) as beside:
        for epoch in range(1, 200):
            one, other = supervisor(2), supervisor(3)
            # Records get longer and shorter again, and take each other's place.
            view = first_view(NODES * (1 + epoch % 7 * epoch % 5))
            proposal = Proposal(ballot=ballot(epoch, 0), view=view)
            with register.turn(one):
                one.memory = one.memory.accepting(proposal, (first_view(NODES),) * epoch)
            with beside.turn(other):
                assert other.memory == one.memory
        assert os.fstat(register._fd).st_size < 1 << 18


def test_who_is_killed_while_it_writes_leaves_what_was_there(
    register: NodeRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervisor(2)
    with register.turn(one):
        one.memory = one.memory.promising(ballot(4, 1))
    whole, write = one.memory, os.pwrite

    def killed(fd: int, data: bytes, at: int) -> int:
        write(fd, data[: len(data) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def promise() -> None:
        own = NodeRegister.of_process(os.getppid())
        monkeypatch.setattr(node_register.os, "pwrite", killed)
        with own.turn(one):
            one.memory = one.memory.promising(ballot(5, 1))

    process = FORK.Process(target=promise)
    process.start()
    process.join(LONG_S)
    assert process.exitcode == -signal.SIGKILL
    with closing(NodeRegister.of_process(os.getpid())) as beside:
        other = supervisor(3)
        with beside.turn(other):
            assert other.memory == whole


def hold(holds: Event) -> None:
    register = NodeRegister.of_process(os.getppid())
    with register.turn(supervisor(3)):
        holds.set()
        signal.pause()


def test_a_turn_waits_for_that_of_another_one_and_not_without_end(
    register: NodeRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_register, "_TURN_S", 0.2)
    holds = FORK.Event()
    process = FORK.Process(target=hold, args=(holds,))
    process.start()
    assert holds.wait(LONG_S)
    with pytest.raises(AgreementError, match="at its vote"), register.turn(supervisor(2)):
        pass
    process.kill()
    process.join(LONG_S)
    with register.turn(supervisor(2)):  # its lock went with it
        pass


def test_it_is_gone_with_those_who_have_it_open() -> None:
    before = set(os.listdir("/dev/shm"))
    register = NodeRegister.create()
    assert set(os.listdir("/dev/shm")) == before
    register.close()
    with pytest.raises(AgreementError, match=f"process {os.getpid()}"):
        NodeRegister.of_process(os.getpid())


def test_who_remembers_less_learns_and_forgets_nothing() -> None:
    low = NodeMemory().promising(ballot(2, 0))
    view = first_view(NODES)
    high = low.accepting(Proposal(ballot=ballot(3, 1), view=view), (view,))
    assert low.joined(high) is high
    assert high.joined(low) is high
    later = low.promising(ballot(9, 2))
    for both in (high.joined(later), later.joined(high)):
        assert (both.promised, both.accepted) == (later.promised, high.accepted)
