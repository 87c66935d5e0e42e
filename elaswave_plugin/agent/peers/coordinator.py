"""Carries out what the agreement decides: links to other agents, heartbeats, leases, deadlines."""

import socket
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from elaswave_plugin.agent.peers.hang_watch import HangWatch, Trainers, WaitWatch
from elaswave_plugin.agent.peers.job_lease import JobLease
from elaswave_plugin.agent.peers.job_summary import Changes, words_of, words_of_view
from elaswave_plugin.agent.peers.links import Links
from elaswave_plugin.agent.peers.unheard import Reach, Resent, Unheard
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.lease import Lease
from elaswave_plugin.core.agreement.messages import (
    Disconnect,
    Effect,
    Message,
    Note,
    Send,
)
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.reporter import FIRST_NODES
from elaswave_plugin.core.agreement.timeouts import Heartbeat
from elaswave_plugin.core.codec import UnreadableMessageError, from_json
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import Beat, FromPeer, Goodbye
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.progress_page import lease_clock_s
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Encoder, Frame
from elaswave_plugin.tracking.events import EventLog

APART_S = 1.5
"""Where two wait in a circle, so long a silence between them is why: one answers each second."""

MOST_CONTACTS = 16

AGENT_GRACE_S = 1.0
"""For so long a node whose link broke is dialled all the time: its next agent is about to come."""


class TrainerSide(Trainers, Protocol):
    """The agent around the coordinator, with what that asks of it."""

    def started(self) -> None:
        """Every worker of the job has sealed its first snapshot."""

    def lend(self, until_s: float) -> None:
        """The trainers may act for the job until then, by the clock of leases."""


class Coordinator:
    """One agent's agreement with its links; `settle` runs after each batch of events."""

    def __init__(
        self,
        reactor: Reactor,
        agreement: Agreement,
        own: Peer,
        *,
        secret: Secret,
        heartbeat: Heartbeat,
        trainer_side: TrainerSide,
        store: Callable[[Record], None],
        events: EventLog,
        job_lease: JobLease | None = None,
    ) -> None:
        """`store`: keeps what the agent's next life begins with, before anybody is told."""
        self._reactor = reactor
        self.agreement = agreement
        self.own = own
        self._heartbeat = heartbeat
        self._trainer_side = trainer_side
        self._store = store
        self._events = events
        self._stored: tuple[object, ...] = ()
        self._said_epoch = agreement.committed.epoch
        # The agreement forgets views of long ago.
        self.changes = Changes(agreement.committed)
        # Newcomers come to a job that has, and next lives to one that may have.
        self._told_start = agreement.started
        self._links = Links(reactor, own, self, secret=secret, grace_s=AGENT_GRACE_S)
        self._hangs = HangWatch(
            reactor,
            agreement=agreement,
            trainers=trainer_side,
            events=events,
            unheard=self._unheard_now,
            every_s=heartbeat.every_s,
        )
        self._reach = Reach(reactor, secret=secret, events=events)
        self._waits = WaitWatch(agreement, events, secret)
        self._lease = Lease(lasts_s=heartbeat.timeout_s)
        self._job_lease = job_lease
        # The newest beat of each one, and when it came, by the clock of leases.
        self._last_beats: dict[int, tuple[int, float]] = {}
        self._heard_s: dict[int, float] = {}
        self._resent = Resent(heartbeat.timeout_s)
        # Nodes that are gone as far as their links tell, and that nobody has needed yet.
        self._gone: dict[int, str] = {}
        self.unheard = Unheard(own.node, events=events)
        self._encode = Encoder()
        self._beat_due_s = time.monotonic()
        self._alarm_s: float | None = None

    def go_on(self, changes: Changes) -> None:
        """Say what comes after these changes, which an earlier life has said."""
        self.changes, self._said_epoch = changes, changes.view.epoch

    def start(self, links: Iterable[tuple[Peer, socket.socket]] = ()) -> None:
        """Begin, with connections that are there already."""
        for peer, sock in links:
            self._links.take(peer, sock, None)
        self._reactor.after_round = self.settle
        self._beat()

    # ---- inputs -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the agreement act on everything that happened, and carry it out."""
        self._lose_who_is_needed()
        while effects := self.agreement.settle(time.monotonic()):
            self.store_record()
            for effect in effects:
                self._carry_out(effect)
            self._lose_who_is_needed()
        self._say_views()
        self.store_record()
        self._keep_links()
        if self.agreement.started and not self._told_start:
            self._say_address()
            self._told_start = True
            self._trainer_side.started()
        self._set_alarm()

    def take_link(self, peer: Peer, sock: socket.socket, epoch: int) -> None:
        """Use the link that another agent of the job has opened."""
        self._links.take(peer, sock, epoch)

    def finish(self, timeout_s: float) -> None:
        """Say goodbye on every link, so that no last word is lost, and close."""
        self._links.finish(self._encode(Goodbye()), timeout_s)

    def enter(self, slot: int, *, wanted: Callable[[], bool]) -> None:
        """A trainer is built: ask for its entry once all members of other nodes are reached.

        It is not asked for where it is no longer ``wanted()``.
        """
        self._reach.wait(
            slot,
            self._far_members,
            wanted=wanted,
            then=lambda: self.agreement.trainer_ready(slot, time.monotonic()),
        )

    def lend(self) -> None:
        """Tell the trainers until when they may act for the job, by the clock of leases."""
        if self.agreement.leads:
            voters, most_s = {*self.agreement.committed.nodes}, float("inf")
            if self._job_lease is not None:
                most_s = self._job_lease.until_s
            self._lease.lead(own=self.own.node, voters=voters, now_s=lease_clock_s(), most_s=most_s)
        # A life that has no lease yet leaves the trainers what its former one has lent. Where the
        # job has a lease, nothing is lent before that was renewed.
        if self._lease.until_s > 0 or self._job_lease is not None:
            self._trainer_side.lend(self._lease.until_s)

    # ---- what the links tell ------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest view that is known to be committed."""
        return self.agreement.committed.epoch

    def on_open(self, peer: Peer, epoch: int) -> None:
        """There is a new link with an agent, which knows of the view `epoch`."""
        self._gone.pop(peer.node, None)
        self._resent.forget(peer.node)
        self._last_beats.pop(peer.node, None)
        if peer.node in self._heard_s:
            self._heard_s[peer.node] = time.monotonic()
        self.agreement.linked(peer.node, epoch)
        self._send_beats({peer.node} & self._watched())

    def on_bytes(self, node: int) -> None:
        """A long message is a sign of life before its end."""
        if node in self._heard_s:
            self._heard_s[node] = time.monotonic()

    def on_frame(self, node: int, frame: Frame) -> None:
        """An agent says something."""
        try:
            message: FromPeer = from_json(FromPeer, frame)
        except UnreadableMessageError as error:
            # A peer that hears less than was said does not act on the rest of it.
            self._links.close(node)
            self._gone[node] = f"its agent {error}"
            return
        match message:
            case Goodbye():
                pass  # its link closes, and nobody listens there any more
            case Beat():
                self._hangs.heard(node, message)
                self._take_beat(node, message)
            case _:
                self.agreement.receive(node, message, time.monotonic())

    def on_gone(self, node: int, evidence: str) -> None:
        """Nobody answers for a node."""
        self._gone[node] = f"its agent is gone: {evidence}"

    @property
    def is_counted_in(self) -> bool:
        """True if the others are sure to count this node in."""
        return self._lease.counted_until_s > lease_clock_s()

    # ---- inside -------------------------------------------------------------------------------

    def store_record(self) -> None:
        """Keep what the next life begins with, where that has changed."""
        known = self._said_epoch, *self.agreement.to_store
        if known != self._stored:
            self._stored = known
            self._store(self.agreement.record())

    def _keep_links(self) -> None:
        """Have links with the first nodes; one that leads, or is to lead, has them with all."""
        agreement = self.agreement
        living = agreement.nodes.living()
        leads = agreement.leader == self.own.node
        wanted = living if leads else living[:FIRST_NODES]
        addresses = agreement.addresses
        self._links.want({node: addresses[node] for node in wanted if node != self.own.node})

    def _far_members(self) -> dict[int, str]:
        """Return where the agents of the other nodes with members answer."""
        agreement = self.agreement
        nodes = {*agreement.committed.nodes} - {self.own.node}
        return {node: agreement.addresses[node] for node in nodes if agreement.nodes.lives(node)}

    def _lose_who_is_needed(self) -> None:
        """A node that is gone is a loss where one end leads; elsewhere it may be the link alone.

        The leader has a link with each of the others, watches it, and names the lost ones. Two
        others say nothing to each other, so both go on without a link until one of them leads. One
        that cannot hear the leader would lead itself; those that hear the leader refuse that.
        """
        while self._gone:
            leader = self.agreement.leader
            if leader != self.own.node and leader not in self._gone:
                return
            for node in list(self._gone) if leader == self.own.node else [leader]:
                self.agreement.lost(node, self._gone.pop(node))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.to, effect.message)
            case Disconnect():
                self._gone.pop(effect.node, None)
                self._links.close(effect.node)
                self._heard_s.pop(effect.node, None)
            case Note():
                self._record(effect)
            case _:
                self._trainer_side.carry_out(effect)

    def _send(self, to: int, message: Message) -> None:
        channel = self._links.channels.get(to)
        # Without a link: the one that opens it is told what matters (`Agreement.linked`).
        if channel is not None:
            channel.send_encoded(self._encode(message))

    def _record(self, note: Note) -> None:
        self._events.emit(note.kind, **note.fields)
        words = words_of(note)
        if words is not None:
            say(words)

    def _say_views(self) -> None:
        """Say the new views: what becomes of the job is in the log of each node."""
        history = self.agreement.history
        for number, view in enumerate(history):
            if view.epoch > self._said_epoch:
                self._said_epoch = view.epoch
                self.changes.follow(view)
                words = words_of_view(view, history[:number])
                if words is not None:
                    say(words)

    def _say_address(self) -> None:
        """Say the job's address, once a node, and not of a job that is refused before it begins."""
        at = self.own.data
        say(
            f"the job: `elaswave status --connect {at}`; to join it"
            f" `elaswave run --join {at} SCRIPT ARGS`, with its own script and arguments"
        )

    def _beat(self) -> None:
        """Send heartbeats and look for agents that have been silent too long.

        The leader and each other one watch each other; the next leader begins with that.
        """
        now_s = time.monotonic()
        late_s, watched = now_s - self._beat_due_s, self._watched()
        self._heard_s = {node: self._heard_s.get(node, now_s) for node in watched}
        self._hangs.begin_beat()
        if self.agreement.leader == self.own.node:
            self._waits.look(self._hangs.pages)
        self._tell_job_lease()
        self.lend()
        self._send_beats(watched)
        if late_s > self._heartbeat.every_s:
            # It is this process that did not run: what the others sent is still unread.
            since_s = now_s - self._heartbeat.every_s
            self._heard_s = {node: max(at_s, since_s) for node, at_s in self._heard_s.items()}
        else:
            self._lose_the_silent(now_s)
            self.unheard.look(self._silences())
        self._beat_due_s = now_s + self._heartbeat.every_s
        self._reactor.after(self._heartbeat.every_s, self._beat)

    def _watched(self) -> set[int]:
        """Return the nodes that it sends beats: the leader, or all others where it leads itself."""
        leader, own = self.agreement.leader, self.own.node
        return {*self.agreement.nodes.living()} - {own} if leader == own else {leader}

    def _send_beats(self, nodes: Iterable[int]) -> None:
        lease_s = lease_clock_s()
        number = self._lease.send(now_s=lease_s)
        for node in nodes:
            self._send_beat(node, number, lease_s)

    def _send_beat(self, node: int, number: int, lease_s: float) -> None:
        channel = self._links.channels.get(node)
        if channel is None:
            return
        heard, at_s = self._last_beats.get(node, (0, lease_s))
        # It has promised another leader, and so not this one's time.
        heard = heard if self.agreement.follows else 0
        beat = Beat(
            n=number,
            heard=heard,
            left=self._lease.left_s(at_s),
            pages=self._hangs.pages_for(node),
            waiting=self._hangs.waiting_for(node),
        )
        channel.send(beat)

    def _lose_the_silent(self, now_s: float) -> None:
        for node, at_s in list(self._heard_s.items()):
            channel = self._links.channels.get(node)
            limit_s = self._heartbeat.timeout_s
            if channel is not None:
                limit_s = self._resent.limit_s(node, channel.answers, now_s=now_s)
            if now_s - at_s > limit_s:
                at = self.agreement.addresses[node]
                self.agreement.lost(node, f"its agent at {at} was silent for {limit_s:g} s")

    def _silences(self) -> dict[int, float]:
        """Return how long the machines of other agents have answered nothing."""
        channels = self._links.channels.items()
        return {node: one.answers.silent_s for node, one in channels if not one.closed}

    def _unheard_now(self) -> tuple[int, ...]:
        """Return the slots of those whose machines do not answer the kernel's questions."""
        silent = {node for node, silent_s in self._silences().items() if silent_s > APART_S}
        of_slots = self.agreement.nodes.of_slots
        return tuple(slot for slot, node in enumerate(of_slots) if node in silent)

    def _take_beat(self, node: int, beat: Beat) -> None:
        """Note a beat, and extend the lease from the own beat that the sender has heard.

        The lease says for how long this node may count on being in the job.
        """
        now_s = lease_clock_s()
        is_first, could_act = node not in self._last_beats, self._lease.left_s(now_s) > 0
        self._last_beats[node] = beat.n, now_s
        if node == self.agreement.leader:
            self._lease.granted(beat.heard, left_s=beat.left, now_s=now_s)
        else:
            self._lease.acknowledged(node, beat.heard, now_s=now_s)
        self.lend()
        # A job begins as soon as its leader, and then the others, have a lease: the first beat of a
        # link is answered at once, and all hear of the leader's lease when it gets one.
        if not could_act and self._lease.left_s(now_s) > 0:
            self._send_beats(self._watched())
        elif is_first:
            self._send_beats({node} & self._watched())

    def _tell_job_lease(self) -> None:
        """Have the agent that leads renew the lease of the job, and name those that live."""
        if self._job_lease is not None:
            agreement = self.agreement
            living = [node for node in agreement.nodes.living() if node != self.own.node]
            others = [agreement.addresses[node] for node in living[:MOST_CONTACTS]]
            self._job_lease.tell(leads=agreement.leads, contacts=(self.own.data, *others))

    def _set_alarm(self) -> None:
        """Have `settle` run at the agreement's next deadline."""
        deadline_s = self.agreement.deadline_s()
        if deadline_s is not None and deadline_s != self._alarm_s:
            self._reactor.after(max(0.0, deadline_s - time.monotonic()), _wake)
        self._alarm_s = deadline_s


def _wake() -> None:
    """A timer that only ends the wait: `settle` runs after each batch of events anyway."""
