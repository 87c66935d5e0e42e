"""A trainer's control link, whose agent dies and is followed by another one."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.core.agreement.messages import Ballot, Begun, Settled
from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.frames import (
    Finish,
    Join,
    Progress,
    Sealed,
    SetConstants,
)
from elaswave_plugin.ipc.wire import encode, receive_frame, send_frame
from elaswave_plugin.trainer.control_link import SAY, TRAINER, ControlLink, dial_agent, say_once
from tests.agent.serving import SlotStore
from tests.core.over_the_wire import as_json
from tests.core.sealed import sealed
from tests.idle import Deadline, within
from tests.job_secret import SECRET

LONG_S = 10.0


class Agents:
    """The agents of a node, one after the other, with one trainer's link."""

    def __init__(self) -> None:
        self.epoch = 0
        self.told_epochs: list[int] = []
        self.taken: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.ends: SimpleQueue[str] = SimpleQueue()
        self.is_between_lives = threading.Event()
        self.has_guardian = True
        self.sock, self._theirs = socket.socketpair()
        self.link = ControlLink(
            self.dial,
            slot=1,
            epoch=lambda: self.epoch,
            on_frame=self.taken.put,
            on_end=self.ends.put,
        )

    def dial(self, epoch: int) -> socket.socket:
        if not self.has_guardian:
            raise ConnectionRefusedError("nobody listens")
        if self.is_between_lives.is_set():
            raise ConnectionResetError("it has died")
        self.told_epochs.append(epoch)
        return self._theirs

    def listen(self) -> None:
        self.link.listen(silence_s=lambda: None, on_silence=lambda: None)

    def die(self) -> None:
        """Break the link; the next life has the other end of a new one."""
        old = self.sock
        self.sock, self._theirs = socket.socketpair()
        old.close()

    def say(self, *messages: WireMessage) -> None:
        for message in messages:
            self.link.send(message)

    def hear(self, *expected: WireMessage) -> None:
        """Assert that exactly these are said next, on the link of this life."""
        for message in expected:
            assert receive_frame(self.sock, LONG_S) == as_json(message)
        self.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            self.sock.recv(1)
        self.sock.settimeout(None)


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    yield made
    made.has_guardian = False
    made.sock.close()


BALLOT = Ballot(term=0, leader=0, epoch=1)
JOIN = Join(facts={"address": "x"}, respawn=0)


def test_the_last_word_of_each_kind_is_said_again_in_order(agents: Agents) -> None:
    first, second = (SetConstants(what={name: 1}) for name in ("model", "seed"))
    newer = SetConstants(what={"model": 2})
    seals = [Sealed(record=sealed(1, step), copy_to=(0,)) for step in (4, 5)]
    said = [JOIN, first, second, seals[0], Settled(slot=1, epoch=1), Progress(text="save")]
    said += [seals[1], Begun(ballot=BALLOT, step=6), newer]
    agents.say(*said)
    agents.hear(*said)
    agents.die()
    agents.listen()
    agents.hear(JOIN, second, Settled(slot=1, epoch=1), seals[1], newer)
    agents.say(Settled(slot=1, epoch=2), Finish(completed=7))
    agents.die()
    # Also what the agent that is dead may have heard.
    while (frame := receive_frame(agents.sock, LONG_S))["t"] != "finish":
        assert frame != as_json(Settled(slot=1, epoch=1))
    assert agents.ends.empty()


def test_what_is_said_without_a_link_is_said_once_there_is_one(agents: Agents) -> None:
    agents.say(JOIN)
    agents.hear(JOIN)
    agents.listen()
    agents.is_between_lives.set()
    agents.die()
    deadline = Deadline(LONG_S)
    while not agents.link._is_down:
        assert deadline.left_s()
        time.sleep(0.001)  # nothing tells that the end of a link was read
    agents.say(Settled(slot=1, epoch=1), Progress(text="save"), Settled(slot=1, epoch=2))
    agents.is_between_lives.clear()
    agents.hear(JOIN, Settled(slot=1, epoch=2))
    agents.say(Progress(text="save"))
    agents.hear(Progress(text="save"))


def test_the_next_agent_is_told_the_newest_view(agents: Agents) -> None:
    agents.listen()
    agents.epoch = 7
    agents.die()
    agents.say(JOIN)
    agents.hear(JOIN)
    assert agents.told_epochs == [0, 7]


def test_a_dead_guardian_is_told_at_once(agents: Agents) -> None:
    agents.listen()
    agents.has_guardian = False
    with within(1.0):
        agents.sock.close()
        why = agents.ends.get(timeout=LONG_S)
    assert why == "the agent of this worker's node is gone: nobody listens"
    with pytest.raises(JobStopped, match="the agent of worker 1 is gone"):
        agents.say(JOIN)


def test_whoever_waits_opens_it_and_the_doorbell_goes_on_with_it(agents: Agents) -> None:
    """Half of a frame that the dead one has sent is no part of what the next one sends."""
    agents.listen()
    with agents.link.receiving_here():
        agents.sock.sendall(encode(Settled(slot=1, epoch=9))[:5])
        assert agents.link.receive(LONG_S)
        agents.die()
        agents.say(JOIN)  # it may be said on the old link, and is said on the new one
        assert agents.link.receive(LONG_S)
        assert receive_frame(agents.sock, LONG_S) == as_json(JOIN)
        send_frame(agents.sock, {"t": "all_sealed"})
        assert agents.link.receive(LONG_S)
        assert agents.taken.get(timeout=LONG_S) == {"t": "all_sealed"}
    send_frame(agents.sock, {"t": "notice"})
    assert agents.taken.get(timeout=LONG_S) == {"t": "notice"}
    agents.die()
    assert receive_frame(agents.sock, LONG_S) == as_json(JOIN)
    assert agents.ends.empty()


def test_a_trainer_comes_by_the_unix_socket_of_its_node() -> None:
    came: SimpleQueue[tuple[dict[str, Any], socket.socket]] = SimpleQueue()
    heard: list[dict[str, Any]] = []

    def hear(request: dict[str, Any]) -> dict[str, Any]:
        heard.append(request)
        return {"t": "heard"}

    takers = {TRAINER: lambda request, sock: came.put((request, sock))}
    server = SnapshotServer(
        SlotStore(0), listen_for_data("127.0.0.1"), {SAY: hear}, takers, secret=SECRET
    )
    server.start()
    link = ControlLink(
        lambda epoch: dial_agent(server.address, SECRET, 3, 2, epoch),
        slot=3,
        epoch=lambda: 5,
        on_frame=lambda frame: None,
        on_end=lambda why: None,
    )
    request, sock = came.get(timeout=LONG_S)
    assert request == {"t": TRAINER, "slot": 3, "incarnation": 2, "epoch": 5}
    with sock:
        assert sock.family is socket.AF_UNIX
        link.send(JOIN)
        assert receive_frame(sock, LONG_S) == as_json(JOIN)
    assert say_once(server.address, SECRET, 3, 2, Settled(slot=1, epoch=1))
    said = {"slot": 3, "incarnation": 2, "frame": as_json(Settled(slot=1, epoch=1))}
    assert heard == [{"t": SAY, **said}]


def test_nothing_can_be_said_to_a_node_without_a_guardian() -> None:
    with within(1.0):
        assert not say_once("127.0.0.1:1", SECRET, 0, 0, JOIN)
        with pytest.raises(ConnectionRefusedError):
            dial_agent("127.0.0.1:1", SECRET, 0, 0, 0)


def test_an_agent_that_does_not_read_is_not_waited_for() -> None:
    theirs, ours = socket.socketpair()
    link = ControlLink(
        lambda epoch: ours,
        slot=3,
        epoch=lambda: 0,
        on_frame=lambda frame: None,
        on_end=lambda why: None,
        send_within_s=0.2,
    )
    began_s = time.monotonic()
    with pytest.raises(JobStopped, match=r"agent of worker 3 has read nothing for 0\.2 s"):
        link.send(Progress(text=random.Random(0).randbytes(1 << 21).hex()))
    assert 0.2 <= time.monotonic() - began_s < LONG_S
    theirs.close()
