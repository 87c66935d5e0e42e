"""Coordinators over real links: what costs a node, and how long until that is known."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elaswave_plugin.agent.peers import coordinator
from elaswave_plugin.agent.peers.coordinator import AGENT_GRACE_S, Coordinator
from elaswave_plugin.agent.peers.links import LINK
from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc import progress_page
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.progress_page import ProgressPage, lease_clock_s
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import LENGTH, Frame, send_frame
from elaswave_plugin.tracking.events import EventLog
from tests.agent.serving import SlotStore
from tests.core.over_the_wire import again
from tests.idle import Clock
from tests.job_secret import SECRET

# A node of eight workers, and two of one each.
NODES = (0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
APART = (0, 1, 2, 3, 4)
BEAT = Heartbeat(every_s=0.1, timeout_s=0.6)
# So that what is seen of a link comes first.
SLOW_BEAT = Heartbeat(every_s=0.1, timeout_s=3.0)
LONG_S = 10.0


class NoTrainer:
    """An agent whose trainers do nothing, and are asked for nothing."""

    def __init__(self) -> None:
        self.lent_s = 0.0

    def lend(self, until_s: float) -> None:
        """Note until when the trainers might act."""
        self.lent_s = until_s

    def progress(self, awake_s: float) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Address:
    """The place where a node's agents answer; without one, as after a loss of power, nobody."""

    def __init__(self) -> None:
        self.listeners = listen_for_data("127.0.0.1")
        self.member: Member | None = None
        # Nodes whose packets get lost on the way to this one.
        self.unheard: set[int] = set()
        host, port = self.listeners[0].getsockname()
        self.text = f"{host}:{port}"

    def serve(self) -> None:
        takers = {LINK: self._take}
        SnapshotServer(SlotStore(0), self.listeners, takers=takers, secret=SECRET).start()

    def close(self) -> None:
        for listener in self.listeners:
            if listener.fileno() >= 0:
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()

    def _take(self, request: Frame, sock: socket.socket) -> None:
        peer = from_json(Peer, request["peer"])
        if self.member is None or peer.node in self.unheard:
            sock.close()
        else:
            self.member.take_link(peer, sock, int(request["epoch"]))


class Network:
    """The addresses of all nodes, and a socket pair for every two."""

    def __init__(self, stack: ExitStack, nodes: tuple[int, ...]) -> None:
        self.of_slots = nodes
        count = 1 + max(nodes)
        self.addresses = [Address() for _ in range(count)]
        self.links: list[dict[int, socket.socket]] = [{} for _ in range(count)]
        for address in self.addresses:
            stack.callback(address.close)
        for one in range(count):
            for other in range(one):
                ends = socket.socketpair()
                self.links[one][other], self.links[other][one] = map(stack.enter_context, ends)

    def peer(self, node: int, life: int = 0) -> Peer:
        return Peer(node=node, pid=1 << 22, life=life, data=self.addresses[node].text)


class Member:
    """The coordinator of one node, in a thread of its own."""

    def __init__(
        self,
        node: int,
        network: Network,
        heartbeat: Heartbeat = BEAT,
        *,
        life: int = 0,
        record: Record | None = None,
    ) -> None:
        """`record`: what the node's agent has stored before it died."""
        self.node = node
        self.network = network
        self.heartbeat = heartbeat
        self.life = life
        self.record = record
        self.says_goodbye = True
        self.lost_s: dict[int, float] = {}
        self.trainer = NoTrainer()
        self.reactor = Reactor()
        self._address = network.addresses[node]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(LONG_S)
        self._address.member = self
        if life == 0:
            self._address.serve()

    def _agreement(self) -> Agreement:
        nodes, life = self.network.of_slots, self.life
        if self.record is not None:
            read = again(self.record)
            now_s = time.monotonic()
            return Agreement.of_next_life(
                read, self.node, timeouts=Timeouts(), life=life, now_s=now_s
            )
        made = Agreement(node=self.node, nodes=nodes, timeouts=Timeouts(), life=life)
        made.addresses = {node: one.text for node, one in enumerate(self.network.addresses)}
        return made

    def _run(self) -> None:
        trainer: Any = self.trainer
        self.agreement = self._agreement()
        self.ours = ours = Coordinator(
            self.reactor,
            self.agreement,
            self.network.peer(self.node, self.life),
            secret=SECRET,
            heartbeat=self.heartbeat,
            trainer_side=trainer,
            store=self._store,
            events=EventLog(None),
        )
        links = self.network.links[self.node] if self.life == 0 else {}
        ours.start((self.network.peer(node), sock.dup()) for node, sock in links.items())
        for sock in links.values():
            sock.close()
        settle = self.reactor.after_round

        def after_round() -> None:
            settle()
            for node in self.lost:
                self.lost_s.setdefault(node, time.monotonic())

        self.reactor.after_round = after_round
        self._ready.set()
        self.reactor.run()
        if self.says_goodbye:
            ours.finish(0.0)
        # The next to lead hears of it last.
        for _, channel in sorted(ours._links.channels.items(), reverse=True):
            channel.close()

    def _store(self, record: Record) -> None:
        self.record = record

    @property
    def lost(self) -> dict[int, str]:
        """The evidence of what it has lost, by node."""
        return self.agreement.nodes.lost

    def take_link(self, peer: Peer, sock: socket.socket, epoch: int) -> None:
        """Another agent opens a link; called in the thread of a server."""

        def take() -> None:
            if not self.agreement.nodes.lives(peer.node):
                send_frame(sock, {"t": LINK, "error": f"node {peer.node} has no part"})
                sock.close()
                return
            send_frame(sock, {"t": "linked", "peer": self.ours.own, "epoch": self.ours.epoch})
            self.ours.take_link(peer, sock, epoch)

        self.reactor.post(take)

    def until_it_lost(self, nodes: set[int]) -> float:
        """Wait until it has lost all of them; returns when, on the monotonic clock."""
        deadline_s = time.monotonic() + LONG_S
        while not nodes <= self.lost_s.keys():
            assert time.monotonic() < deadline_s, self.lost_s
            time.sleep(BEAT.every_s / 10)
        return max(self.lost_s[node] for node in nodes)

    def say(self, other: int, frame: dict[str, Any]) -> None:
        """Send another node something, in the thread that says everything else."""
        self.reactor.post(lambda: self.ours._links.channels[other].send(frame))

    def has_link(self, other: int) -> bool:
        return other in self.ours._links.channels

    def cut(self, other: int) -> None:
        """Break the link to another node, which both ends see."""
        link = self.ours._links.channels[other]
        link._sock.shutdown(socket.SHUT_RDWR)
        # Until this end has seen it, so that a link that is there is another one.
        await_true(lambda: self.ours._links.channels.get(other) is not link)

    def kill(self) -> None:
        """Its guardian is dead: nobody listens, and then its links break."""
        self._address.close()
        self.die()

    def die(self) -> None:
        """Its agent is dead: it does nothing any more, and then its links break."""
        self._address.member = None
        self.says_goodbye = False
        self.end()

    def next_life(self) -> "Member":
        """The agent after this one, which has died, begins with what this one has stored."""
        assert self.record is not None
        return Member(
            self.node, self.network, self.heartbeat, life=self.life + 1, record=self.record
        )

    def end(self) -> None:
        """Stop the thread, once."""
        if not self._thread.is_alive():
            return
        self.reactor.post(self.reactor.stop)
        self._thread.join(LONG_S)

    def close(self) -> None:
        """Give everything back, once nobody dials for it any more."""
        self.end()
        for thread in threading.enumerate():
            if thread.name.startswith("dial node") and thread.is_alive():
                thread.join(LONG_S)
        self.reactor.close()


def await_true(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(BEAT.every_s / 10)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Member]]]:
    """Members of these nodes; all the others are there and silent, as after a loss of power."""
    with ExitStack() as stack:

        def start_members(
            *those: int, nodes: tuple[int, ...] = NODES, heartbeat: Heartbeat = BEAT
        ) -> list[Member]:
            network = Network(stack, nodes)
            members = [Member(node, network, heartbeat) for node in those]
            for member in members:
                stack.callback(member.close)
            return members

        yield start_members


@pytest.fixture
def reborn() -> Iterator[Callable[[Member], Member]]:
    """Have an agent die, and another one go on."""
    with ExitStack() as stack:

        def bear(member: Member) -> Member:
            member.die()
            another = member.next_life()
            stack.callback(another.close)
            return another

        yield bear


def test_a_leaders_node_without_power_is_lost_within_one_timeout(
    start: Callable[..., list[Member]],
) -> None:
    clock = Clock()
    for member in start(1, 2):
        took_s = member.until_it_lost({0}) - clock.began_s
        assert BEAT.timeout_s < took_s
        clock.check(took_s, 2 * BEAT.timeout_s)
        ((node, evidence),) = member.lost.items()
        assert node == 0 and evidence.endswith(" was silent for 0.6 s")
        assert member.agreement.leader == 1


def test_who_answers_beside_a_silent_leader_is_not_lost(
    start: Callable[..., list[Member]],
) -> None:
    members = start(1, 2, 3, nodes=APART[:4])
    for member in members:
        member.until_it_lost({0})
    time.sleep(2 * BEAT.timeout_s)
    for member in members:
        assert set(member.lost_s) == {0}
        assert member.agreement.leader == 1


@pytest.mark.parametrize("slots", [(0,), (0, 1), (0, 1, 2, 3, 4)], ids=len)
def test_trainers_may_act_before_a_second_beat(
    start: Callable[..., list[Member]], slots: tuple[int, ...]
) -> None:
    """A trainer waits for its first lease: the first beats are answered at once."""
    beat = Heartbeat(every_s=LONG_S, timeout_s=5 * LONG_S)
    members = start(*slots, heartbeat=beat, nodes=APART[: len(slots)])
    began_s = time.monotonic()
    await_true(lambda: all(one.trainer.lent_s > lease_clock_s() for one in members))
    assert time.monotonic() - began_s < LONG_S / 2


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
        network = Network(stack, (0, 1, 2))
        leader, other = Member(0, network), Member(2, network)
        for member in (leader, other):
            stack.callback(member.close)
        far = network.links[1][0]
        far.sendall(LENGTH.pack(1 << 20))
        until_s = time.monotonic() + 3 * BEAT.timeout_s
        while time.monotonic() < until_s:
            far.sendall(b" " * 100)
            time.sleep(BEAT.every_s)
        assert not leader.lost_s
        leader.until_it_lost({1})
        assert set(leader.lost_s) == {1}


@pytest.mark.parametrize("hearer", [0, 1])
@pytest.mark.parametrize(
    ("frame", "flaw"),
    [
        ({"t": "sing"}, "'sing', unknown here"),
        ({"t": "beat", "n": 1}, "'beat' without 'heard'"),
        ({"t": "accuse", "node": 0}, "'accuse' without 'evidence'"),
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
        f"its agent said {flaw}: have all run the same version of elaswave_plugin"
    )


# ---- a broken link between two that live ---------------------------------------------------------


def test_a_broken_link_between_two_others_is_opened_again_and_costs_nobody(
    start: Callable[..., list[Member]],
) -> None:
    members = start(*range(5), nodes=APART)
    members[2].cut(3)
    await_true(lambda: members[2].has_link(3) and members[3].has_link(2))
    time.sleep(2 * BEAT.timeout_s)
    assert [member.lost_s for member in members] == [{}] * 5
    members[0].kill()
    for member in members[1:]:
        member.until_it_lost({0})
    time.sleep(2 * BEAT.timeout_s)
    assert [set(member.lost_s) for member in members[1:]] == [{0}] * 4
    assert {member.agreement.leader for member in members[1:]} == {1}


def part(members: list[Member], one: int, other: int) -> None:
    """No packet passes between two nodes any more."""
    addresses = members[0].network.addresses
    addresses[one].unheard.add(other)
    addresses[other].unheard.add(one)
    members[one].cut(other)


def test_two_others_that_stay_apart_cost_nobody_while_the_leader_hears_both(
    start: Callable[..., list[Member]],
) -> None:
    members = start(*range(5), nodes=APART)
    part(members, 2, 3)
    time.sleep(AGENT_GRACE_S + 2 * BEAT.timeout_s)
    assert [member.lost_s for member in members] == [{}] * 5
    assert not members[2].has_link(3)


@pytest.mark.parametrize("dies", [False, True], ids=["link", "agent"])
def test_what_is_seen_without_a_link_is_told_to_the_leader_once_there_is_one(
    start: Callable[..., list[Member]], reborn: Callable[[Member], Member], dies: bool
) -> None:
    """As a loss that a guardian tells an agent's next life before that has its links."""
    leader, other = start(0, 1, nodes=APART[:2])
    leader.network.addresses[0].unheard.add(1)
    if dies:
        other = reborn(other)
    else:
        other.cut(0)
    other.reactor.post(lambda: other.agreement.first_seal(1))
    await_true(lambda: 1 in other.agreement._reports.sealed)
    assert not leader.has_link(1)
    leader.network.addresses[0].unheard.clear()
    await_true(lambda: 1 in leader.agreement._reports.sealed)
    assert not leader.lost_s and not other.lost_s


@pytest.mark.parametrize("other", [2, 3])
def test_who_comes_to_lead_without_a_link_shuts_the_other_one_out(
    start: Callable[..., list[Member]], other: int
) -> None:
    """And not both: whoever is cut off from the next leader does not lead beside it."""
    members = start(*range(5), nodes=APART)
    part(members, 1, other)
    time.sleep(2 * BEAT.timeout_s)
    members[0].kill()
    rest = [member for member in members[1:] if member.node != other]
    members[1].until_it_lost({0, other})
    time.sleep(3 * BEAT.timeout_s)
    # With nothing sealed it stops the job then, before the others are told of that loss.
    assert [set(member.lost_s) - {other} for member in rest] == [{0}] * 3
    assert {member.agreement.leader for member in rest} == {1}


def test_a_leader_and_the_next_whose_guardians_die_together_are_lost_at_once(
    start: Callable[..., list[Member]],
) -> None:
    """Nobody listens at their addresses any more."""
    # What a busy machine has waiting is no silence of theirs.
    members = start(*range(5), nodes=APART, heartbeat=SLOW_BEAT)
    clock = Clock()
    for member in members[:2]:
        member.reactor.post(member.reactor.stop)
    for member in members[:2]:
        member.kill()
    for member in members[2:]:
        clock.check(member.until_it_lost({0, 1}) - clock.began_s, BEAT.timeout_s / 2)
        assert set(member.lost_s) == {0, 1}
        assert all("nobody listens at " in why for why in member.lost.values())
        assert member.agreement.leader == 2


# ---- an agent that dies --------------------------------------------------------------------------


@pytest.mark.parametrize("node", range(4))
def test_an_agent_that_dies_and_is_followed_by_another_costs_nobody(
    start: Callable[..., list[Member]], reborn: Callable[[Member], Member], node: int
) -> None:
    """Be it the leader, one that may follow, or another one; and the next one takes its part."""
    members = start(*range(5), nodes=APART)
    members[node] = reborn(members[node])
    time.sleep(2 * AGENT_GRACE_S + BEAT.timeout_s)
    assert [member.lost_s for member in members] == [{}] * 5
    assert {member.agreement.leader for member in members} == {0}
    # A loss before anything was sealed ends the job: all hear that.
    members[4].kill()
    await_true(lambda: all(member.agreement.over for member in members[:4]))
    assert set(members[0].lost_s) == {4}


def test_agents_that_all_die_at_once_cost_nobody(
    start: Callable[..., list[Member]], reborn: Callable[[Member], Member]
) -> None:
    members = start(0, 1, 2, nodes=APART[:3])
    members = [reborn(member) for member in members]
    time.sleep(2 * AGENT_GRACE_S + BEAT.timeout_s)
    assert [member.lost_s for member in members] == [{}] * 3
    members[0].kill()
    for member in members[1:]:
        member.until_it_lost({0})
        assert member.agreement.leader == 1


@pytest.mark.parametrize("node", [0, 2])
def test_an_agent_that_none_follows_is_lost_once_it_was_silent_for_the_limit(
    start: Callable[..., list[Member]], node: int
) -> None:
    """Its guardian is there, or stopped: somebody takes the connection, and says nothing."""
    members = start(0, 1, 2, nodes=APART[:3], heartbeat=SLOW_BEAT)
    clock = Clock()
    members[node].die()
    # A leader that loses another one ends this job, in which nothing is sealed.
    for member in members[:1] if node == 2 else members[1:]:
        took_s = member.until_it_lost({node}) - clock.began_s
        limit_s = SLOW_BEAT.timeout_s
        assert limit_s - SLOW_BEAT.every_s < took_s
        clock.check(took_s, limit_s + 0.5)
        assert member.lost[node].endswith(f" was silent for {limit_s:g} s")
