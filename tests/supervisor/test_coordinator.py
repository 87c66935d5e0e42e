"""Coordinators over real links: how long it takes until the loss of a whole node is known."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from typing import Any

import pytest

from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.ipc import progress_page
from elaswave_plugin.ipc.lease_clock import lease_clock_s
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.progress_page import ProgressPage
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import LENGTH
from elaswave_plugin.supervisor.peers import coordinator
from elaswave_plugin.supervisor.peers.coordinator import Coordinator
from elaswave_plugin.supervisor.peers.node_register import NodeRegister
from elaswave_plugin.supervisor.peers.rendezvous import Meeting
from elaswave_plugin.tracking.events import EventLog
from tests.job_secret import SECRET

# A node of eight, and two of one worker each.
NODES = (0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
APART = (0, 1, 2, 3, 4)
BEAT = Heartbeat(every_s=0.1, timeout_s=0.6)
LONG_S = 10.0
FORK = multiprocessing.get_context("fork")


class NoTrainer:
    """A supervisor whose trainer does nothing, and is asked for nothing."""

    def __init__(self) -> None:
        self.lent_s = 0.0

    def lend(self, until_s: float) -> None:
        """Note until when the trainer might act."""
        self.lent_s = until_s

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Links:
    """One socket pair for every two slots."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self.of: list[dict[int, socket.socket]] = [{} for _ in range(count)]
        for one in range(count):
            for other in range(one):
                ends = socket.socketpair()
                self.of[one][other], self.of[other][one] = map(stack.enter_context, ends)


class Member:
    """The coordinator of one slot, in a thread of its own."""

    def __init__(
        self,
        slot: int,
        links: dict[int, socket.socket],
        nodes: tuple[int, ...],
        *,
        beside: int | None = None,
        register: NodeRegister | None = None,
    ) -> None:
        """`beside`: the process of another one, with which it shares the register."""
        self.slot = slot
        self._nodes = nodes
        self._beside = beside
        # No two of those that are started here are on one node.
        self._register = register or NodeRegister.create()
        self.says_goodbye = True
        self.lost_s: dict[int, float] = {}
        self.trainer = NoTrainer()
        self._reactor = Reactor()
        self._links = links
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(LONG_S)

    def _run(self) -> None:
        peers = tuple(
            Peer(slot=slot, node=node, pid=self._beside or 1 << 22, control="", data="", machine="")
            for slot, node in enumerate(self._nodes)
        )
        trainer: Any = self.trainer
        ours = Coordinator(
            self._reactor,
            Meeting(peers=peers, links=self._links),
            self._register,
            slot=self.slot,
            secret=SECRET,
            timeouts=Timeouts(),
            heartbeat=BEAT,
            trainer_side=trainer,
            events=EventLog(None),
        )
        self.agreement, self.lost = ours.agreement, ours.lost
        self._channels = ours._channels
        settle = self._reactor.after_round

        def after_round() -> None:
            settle()
            for slot in ours.lost:
                self.lost_s.setdefault(slot, time.monotonic())

        self._reactor.after_round = after_round
        self._ready.set()
        self._reactor.run()
        if self.says_goodbye:
            ours.finish(0.0)
        # The next to lead hears of it last.
        for _, sock in sorted(self._links.items(), reverse=True):
            sock.close()
        self._reactor.close()
        self._register.close()

    def until_it_lost(self, slots: set[int]) -> float:
        """Wait until it has lost all of them; returns when, on the monotonic clock."""
        deadline_s = time.monotonic() + LONG_S
        while not slots <= self.lost_s.keys():
            assert time.monotonic() < deadline_s, self.lost_s
            time.sleep(BEAT.every_s / 10)
        return max(self.lost_s[slot] for slot in slots)

    def say(self, other: int, frame: dict[str, Any]) -> None:
        """Send another slot something, in the thread that says everything else."""
        self._reactor.post(lambda: self._channels[other].send(frame))

    def cut(self, other: int) -> None:
        """Break the link to another slot, which both ends see."""
        self._links[other].shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """It does nothing any more, and then its links break."""
        self.says_goodbye = False
        self.end()

    def end(self) -> None:
        """Stop the thread, once."""
        if not self._thread.is_alive():
            return
        self._reactor.post(self._reactor.stop)
        self._thread.join(LONG_S)


def await_true(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(BEAT.every_s / 10)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Member]]]:
    """Members of these slots; all the others are there and silent, as after a loss of power."""
    with ExitStack() as stack:

        def start_members(*slots: int, nodes: tuple[int, ...] = NODES) -> list[Member]:
            links = Links(stack, len(nodes))
            members = [Member(slot, links.of[slot], nodes) for slot in slots]
            for member in members:
                stack.callback(member.end)
            return members

        yield start_members


def test_a_leaders_node_without_power_is_lost_within_one_timeout(
    start: Callable[..., list[Member]],
) -> None:
    """Not slot by slot, each after a timeout of its own."""
    began_s = time.monotonic()
    for member in start(8, 9):
        took_s = member.until_it_lost(set(range(8))) - began_s
        assert BEAT.timeout_s < took_s < 2 * BEAT.timeout_s
        assert member.agreement.leader == 8


def test_who_answers_beside_a_silent_leader_is_not_lost(
    start: Callable[..., list[Member]],
) -> None:
    members = start(2, 8, 9)
    for member in members:
        member.until_it_lost({0, 1})
    time.sleep(2 * BEAT.timeout_s)
    for member in members:
        assert set(member.lost_s) == {0, 1, 3, 4, 5, 6, 7}
        assert member.agreement.leader == 2


def test_a_lease_runs_out_while_the_machine_is_suspended(
    start: Callable[..., list[Member]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of leases goes on by a minute, and the monotonic one stands still."""
    suspended_s = 0.0
    for module in (coordinator, progress_page):
        monkeypatch.setattr(module, "lease_clock_s", lambda: lease_clock_s() + suspended_s)
    members, page = start(0, 1, 2, nodes=APART[:3]), ProgressPage()

    def may_act(member: Member) -> bool:
        page.lend(member.trainer.lent_s)
        return page.may_act

    def all_may_act() -> bool:
        return all(map(may_act, members))

    await_true(all_may_act)
    page.lend(max(member.trainer.lent_s for member in members))
    assert page.may_act
    suspended_s = 60.0
    assert not page.may_act
    # Nobody was lost meanwhile: those that hear each other may act again.
    await_true(all_may_act)
    assert not any(member.lost_s for member in members)
    page.close()


def test_who_sends_a_long_frame_slowly_is_not_silent() -> None:
    """Its beats wait behind a commit of many megabytes."""
    with ExitStack() as stack:
        ends = Links(stack, 3).of
        leader = Member(0, ends[0], (0, 1, 2))
        stack.callback(leader.end)
        ends[1][0].sendall(LENGTH.pack(1 << 20))
        until_s = time.monotonic() + 3 * BEAT.timeout_s
        while time.monotonic() < until_s:
            ends[1][0].sendall(b" " * 100)
            time.sleep(BEAT.every_s)
        assert set(leader.lost_s) == {2}
        leader.until_it_lost({1})


@pytest.mark.parametrize("hearer", [0, 1])
@pytest.mark.parametrize(
    ("frame", "flaw"),
    [
        ({"t": "sing"}, "'sing', unknown here"),
        ({"t": "beat", "n": 1}, "'beat' without 'heard'"),
        ({"t": "accuse", "slot": 0}, "'accuse' without 'evidence'"),
        ({"t": "settled", "epoch": "soon"}, "'settled' with epoch 'soon'"),
    ],
)
def test_who_says_what_cannot_be_read_is_lost_and_not_who_hears_it(
    start: Callable[..., list[Member]], hearer: int, frame: dict[str, Any], flaw: str
) -> None:
    """Of two versions in one job one goes, be it that of the leader."""
    speaker = 1 - hearer
    members = start(0, 1, nodes=APART[:2])
    members[speaker].say(hearer, frame)
    members[hearer].until_it_lost({speaker})
    assert members[hearer].lost[speaker] == (
        f"its supervisor said {flaw}: have all run the same version of elaswave_plugin"
    )


# ---- a broken link between two that live ---------------------------------------------------------


def test_a_broken_link_between_two_others_costs_nobody(start: Callable[..., list[Member]]) -> None:
    members = start(*range(5), nodes=APART)
    members[2].cut(3)
    time.sleep(2 * BEAT.timeout_s)
    assert [member.lost_s for member in members] == [{}] * 5
    members[0].kill()
    for member in members[1:]:
        member.until_it_lost({0})
    time.sleep(2 * BEAT.timeout_s)
    assert [set(member.lost_s) for member in members[1:]] == [{0}] * 4
    assert {member.agreement.leader for member in members[1:]} == {1}


@pytest.mark.parametrize("other", [2, 3])
def test_who_comes_to_lead_without_a_link_shuts_the_other_one_out(
    start: Callable[..., list[Member]], other: int
) -> None:
    """And not both: whoever is cut off from the next leader does not lead beside it."""
    members = start(*range(5), nodes=APART)
    members[1].cut(other)
    time.sleep(2 * BEAT.timeout_s)
    members[0].kill()
    rest = [member for member in members[1:] if member.slot != other]
    for member in rest:
        member.until_it_lost({0, other})
    time.sleep(3 * BEAT.timeout_s)
    assert [set(member.lost_s) for member in rest] == [{0, other}] * 3
    assert {member.agreement.leader for member in rest} == {1}


def test_a_leader_and_the_next_that_die_together_are_lost_at_once(
    start: Callable[..., list[Member]],
) -> None:
    """That the link to the next one breaks first says nothing about who lives."""
    members = start(*range(5), nodes=APART)
    began_s = time.monotonic()
    for slot in (2, 3, 4):
        members[1].cut(slot)
    members[0].kill()
    for member in members[2:]:
        assert member.until_it_lost({0, 1}) - began_s < BEAT.timeout_s / 2
        assert set(member.lost_s) == {0, 1}


# ---- a supervisor that is stopped while it votes -------------------------------------------------


def stop_at_its_vote(register: NodeRegister, holds: Event) -> None:
    agreement = Agreement(slot=1, nodes=(0, 0), timeouts=Timeouts())
    with register.turn(agreement, limit_s=LONG_S, on_stuck=lambda pid: None):
        holds.set()
        os.kill(os.getpid(), signal.SIGSTOP)


def test_who_is_stopped_at_its_vote_does_not_keep_its_node_from_voting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Else those beside it would wait until they are lost too."""
    with ExitStack() as stack:
        holds, register = FORK.Event(), NodeRegister.create()
        stopped = FORK.Process(target=stop_at_its_vote, args=(register, holds))
        stopped.start()
        stack.callback(stopped.join, LONG_S)
        stack.callback(stopped.kill)
        assert holds.wait(LONG_S)
        began_s = time.monotonic()
        member = Member(0, Links(stack, 2).of[0], (0, 0), beside=stopped.pid, register=register)
        stack.callback(member.end)
        took_s = time.monotonic() - began_s
        assert took_s > BEAT.timeout_s / 2
        stopped.join(LONG_S)
        assert stopped.exitcode == -signal.SIGKILL
    expected = f"the supervisor of worker 1 (pid {stopped.pid}) was stopped at its vote: killed"
    assert expected in capfd.readouterr().err
