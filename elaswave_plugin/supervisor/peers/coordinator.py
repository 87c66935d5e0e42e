"""Carries out what the agreement decides: links to the other supervisors, heartbeats, deadlines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from elaswave_plugin.core.agreement.effects import (
    Connect,
    Deliver,
    Disconnect,
    Dismiss,
    Effect,
    Fence,
    Note,
    Over,
    Ring,
    Send,
)
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.lease import Lease
from elaswave_plugin.core.agreement.messages import Committed, Message
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import UnreadableMessageError, from_json
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import Ask, Beat, FromPeer, Goodbye, Here
from elaswave_plugin.ipc.lease_clock import lease_clock_s
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.silence import have_probed
from elaswave_plugin.ipc.wire import Channel, Frame, encode, has_ended
from elaswave_plugin.supervisor.peers.hang_watch import HangWatch
from elaswave_plugin.supervisor.peers.job_summary import Changes
from elaswave_plugin.supervisor.peers.node_register import NodeRegister
from elaswave_plugin.supervisor.peers.reach import Reach
from elaswave_plugin.supervisor.peers.rendezvous import Meeting
from elaswave_plugin.supervisor.peers.resent import Resent
from elaswave_plugin.supervisor.peers.spoken_notes import words_of, words_of_view
from elaswave_plugin.supervisor.peers.unheard import Unheard
from elaswave_plugin.supervisor.peers.wait_watch import WaitWatch
from elaswave_plugin.tracking.events import EventLog

_ASKS = 3
"""Questions in vain to a supervisor beside a silent leader, before it is lost with it: half of the
default timeout, since these were not watched before."""

"""The least beats of a silence: one or two may be late."""

APART_S = 1.5
"""Where two wait in a circle, so long a silence between them is why: one answers each second."""


class TrainerSide(Protocol):
    """The operations that the coordinator asks of the supervisor around it."""

    def ring(self, ring: Ring) -> None: ...

    def deliver(self, committed: Committed, path: tuple[MembershipView, ...]) -> None: ...

    def started(self) -> None: ...

    def dismiss(self) -> None: ...

    def fence(self, evidence: str) -> None: ...

    def peer_replaced(self, slot: int) -> None: ...

    def progress(self, awake_s: float) -> Sample | None: ...

    def lend(self, until_s: float) -> None: ...

    def end(self, reason: str, exit_code: int) -> None: ...


class Coordinator:
    """One supervisor's agreement with its links; `settle` runs after each batch of events."""

    def __init__(
        self,
        reactor: Reactor,
        meeting: Meeting,
        register: NodeRegister,
        *,
        slot: int,
        secret: Secret,
        timeouts: Timeouts,
        heartbeat: Heartbeat,
        trainer_side: TrainerSide,
        events: EventLog,
    ) -> None:
        self._reactor = reactor
        self._register = register
        self.peers = list(meeting.peers)
        """All supervisors by slot, the lost ones among them."""
        self._slot = slot
        self._heartbeat = heartbeat
        self._trainer_side = trainer_side
        self._events = events
        if meeting.welcome is None:
            nodes = tuple(peer.node for peer in meeting.peers)
            self.agreement = Agreement(slot=slot, nodes=nodes, timeouts=timeouts)
        else:
            life = int.from_bytes(os.urandom(6), "little")
            self.agreement = Agreement.of_newcomer(meeting.welcome, timeouts=timeouts, life=life)
        self._said_epoch = self.agreement.committed.epoch
        # The agreement forgets views of long ago.
        self.changes = Changes(self.agreement.committed)
        # Newcomers come to a job that has.
        self._told_start = self.agreement.started
        self.lost: dict[int, str] = self.agreement.without_supervisor
        """Slots whose supervisors are gone or never came, with what was seen of it."""
        self._channels: dict[int, Channel] = {}
        self._hangs = HangWatch(
            reactor,
            agreement=self.agreement,
            trainer=trainer_side,
            events=events,
            unheard=self._unheard_now,
            every_s=heartbeat.every_s,
        )
        self._reach = Reach(reactor, slot=slot, secret=secret, events=events)
        self._waits = WaitWatch(self.agreement, self.peers, events, secret)
        self._lease = Lease(lasts_s=heartbeat.timeout_s)
        # The newest beat of each one, and when it came, by the clock of leases.
        self._last_beats: dict[int, tuple[int, float]] = {}
        self._neighbours: dict[int, int] = {}
        self._arriving: set[int] = set()
        # Those that have said goodbye.
        self._ending: set[int] = set()
        for peer in self.peers:
            if peer.slot not in self.lost:
                self._open_neighbour(peer)
        self._held: dict[str, tuple[Peer, socket.socket]] = {}
        self._heard_s: dict[int, float] = {}
        self._resent = Resent(heartbeat.timeout_s)
        # How often those beside a silent leader were asked since they were last heard.
        self._asked: dict[int, int] = {}
        # Links to others that broke, where neither end leads: what was seen.
        self._cut: dict[int, str] = {}
        self.unheard = Unheard(slot, events=events)
        self._last_sent: tuple[Message | None, bytes] = (None, b"")
        self._beat_due_s = time.monotonic()
        self._alarm_s: float | None = None
        for peer_slot, sock in meeting.links.items():
            self._add_link(peer_slot, sock)
        reactor.after_round = self.settle
        self._beat()

    # ---- inputs -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the agreement act on everything that happened, and carry it out."""
        self._lose_who_is_needed()
        while effects := self._decide():
            for effect in effects:
                self._carry_out(effect)
            self._lose_who_is_needed()
        self._say_views()
        if self.agreement.started and not self._told_start:
            self._say_address()
            self._told_start = True
            self._trainer_side.started()
        self._set_alarm()

    def _decide(self) -> list[Effect]:
        with self._turn(None):
            return self.agreement.settle(time.monotonic())

    def _turn(self, message: Message | None) -> contextlib.AbstractContextManager[None]:
        return self._vote() if self.agreement.votes(message) else contextlib.nullcontext()

    def _vote(self) -> contextlib.AbstractContextManager[None]:
        # Before the others take this one for lost too, which waits and sends no beat.
        limit_s = self._heartbeat.timeout_s / 2
        return self._register.turn(self.agreement, limit_s=limit_s, on_stuck=self._end_stuck)

    def _end_stuck(self, pid: int) -> None:
        """While another supervisor of this node is stopped at its vote, none of them can vote."""
        for slot, pidfd in self._neighbours.items():
            if self.peers[slot].pid == pid:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                say(f"the supervisor of worker {slot} (pid {pid}) was stopped at its vote: killed")

    def hold(self, peer: Peer, sock: socket.socket) -> None:
        """The link of a supervisor that wants to join; it is read once that is let in."""
        for address, (_, held) in list(self._held.items()):
            if address == peer.data or has_ended(held):
                held.close()
                del self._held[address]
        sock.setblocking(False)
        self._held[peer.data] = peer, sock

    def finish(self, timeout_s: float) -> None:
        """Say goodbye on every link, so that no last word is lost, and close.

        Nothing of this worker acts for the job any more: this process need not be killed.
        """
        channels = list(self._channels.values())
        # Everybody has it before anybody sees a link close, and accuses this one of being gone.
        for channel in channels:
            channel.send(Goodbye())
        for channel in channels:
            channel.half_close(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            channel.await_end(deadline_s)
        for pidfd in self._neighbours.values():
            os.close(pidfd)
        self._neighbours.clear()

    def enter(self, *, wanted: Callable[[], bool]) -> None:
        """The trainer is built: ask for its entry once all members of other nodes are reached.

        It is not asked for where it is no longer ``wanted()``.
        """
        self._reach.wait(
            self._far_members,
            wanted=wanted,
            then=lambda: self.agreement.trainer_ready(time.monotonic()),
        )

    # ---- inside -------------------------------------------------------------------------------

    def _far_members(self) -> dict[int, str]:
        """Return where the supervisors of the members on other nodes answer."""
        own, members = self.peers[self._slot].node, self.agreement.committed.ranks
        return {slot: self.peers[slot].data for slot in members if self.peers[slot].node != own}

    def _open_neighbour(self, peer: Peer) -> None:
        """A pidfd of another supervisor on this node, to fence it for sure."""
        if peer.node == self.peers[self._slot].node and peer.slot != self._slot:
            # A peer that is gone already is told by its link.
            with contextlib.suppress(ProcessLookupError):
                self._neighbours[peer.slot] = os.pidfd_open(peer.pid)

    def _connect(self, order: Connect) -> None:
        """Another supervisor has a slot: its link takes the place of its predecessor's."""
        slot = order.slot
        old = self._channels.get(slot)
        if old is not None:
            old.close()
        if slot in self._neighbours:
            os.close(self._neighbours.pop(slot))
        self.lost.pop(slot, None)
        self._arriving.discard(slot)
        self._ending.discard(slot)
        self._heard_s.pop(slot, None)
        self._asked.pop(slot, None)
        self._resent.forget(slot)
        self._cut.pop(slot, None)
        self._last_beats.pop(slot, None)
        held = self._held.pop(order.address, None)
        if held is None:
            self._lose(slot, "it joined without a link to this worker")
            return
        self.peers[slot] = replace(held[0], node=order.node)
        # It may still give up, and then lives on without a slot: only once it speaks is it fenced.
        self._arriving.add(slot)
        self._add_link(slot, held[1])
        self._channels[slot].send({"t": "admitted"})
        self._trainer_side.peer_replaced(slot)

    def _add_link(self, peer: int, sock: socket.socket) -> None:
        def heard() -> None:
            if peer in self._heard_s:
                self._heard_s[peer] = time.monotonic()
            self._asked.pop(peer, None)

        def frame_came(frame: Frame) -> None:
            now_s = time.monotonic()
            if peer in self._arriving:
                self._arriving.discard(peer)
                self._open_neighbour(self.peers[peer])
            try:
                message: FromPeer = from_json(FromPeer, frame)
            except UnreadableMessageError as error:
                # A peer that hears less than was said does not act on the rest of it.
                self._channels[peer].close()
                self._cut[peer] = f"its supervisor {error}"
                return
            match message:
                case Goodbye():
                    self._ending.add(peer)
                case Ask():
                    self._channels[peer].send(Here())
                case Here():
                    pass  # it has been heard: that is all
                case Beat():
                    self._hangs.heard(peer, message)
                    self._take_beat(peer, message)
                case _:
                    with self._turn(message):
                        self.agreement.receive(peer, message, now_s)

        def closed(evidence: str) -> None:
            self._cut[peer] = f"its supervisor (pid {self.peers[peer].pid}) is gone: {evidence}"

        self._channels[peer] = Channel(
            self._reactor, sock, on_frame=frame_came, on_close=closed, on_bytes=heard
        )
        have_probed(sock)

    def _lose(self, peer: int, evidence: str) -> None:
        self.lost.setdefault(peer, evidence)
        self.agreement.lost(peer, evidence)

    def _lose_who_is_needed(self) -> None:
        """A broken link is a loss where one end leads; elsewhere it may be the link alone.

        The leader has a link with each of the others, watches it, and names the lost ones. Two
        others say nothing to each other, so both go on without a link until one of them leads. One
        that cannot hear the leader would lead itself; those that hear the leader refuse that.
        """
        while self._cut:
            leader = self.agreement.leader
            if leader != self._slot and leader not in self._cut:
                return
            for slot in list(self._cut) if leader == self._slot else [leader]:
                self._lose(slot, self._cut.pop(slot))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.to, effect.message)
            case Ring():
                self._trainer_side.ring(effect)
            case Deliver():
                path = (*effect.skipped, effect.committed.proposal.view)
                self._trainer_side.deliver(effect.committed, path)
            case Dismiss():
                self._trainer_side.dismiss()
            case Fence():
                self._trainer_side.fence(effect.evidence)
            case Disconnect():
                self._disconnect(effect)
            case Connect():
                self._connect(effect)
            case Over():
                self._trainer_side.end(effect.reason, effect.exit_code)
            case Note():
                self._record(effect)

    def _send(self, to: int, message: Message) -> None:
        """A message to many is encoded once."""
        if self._last_sent[0] is not message:
            self._last_sent = message, encode(message)
        if to in self._channels:  # a newcomer whose link is not there is lost already
            self._channels[to].send_encoded(self._last_sent[1])

    def _disconnect(self, order: Disconnect) -> None:
        """Shut a lost supervisor out. On this node it is killed: it may only have been stopped.

        One that has said goodbye is left to end by itself.
        """
        seen = self._cut.pop(order.slot, "declared lost by the leader")
        self.lost.setdefault(order.slot, seen)
        pidfd = self._neighbours.get(order.slot)
        if pidfd is not None and order.kill and order.slot not in self._ending:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if order.slot in self._channels:
            self._channels[order.slot].close()

    def _record(self, note: Note) -> None:
        self._events.emit(note.kind, **note.fields)
        words = words_of(note)
        if words is not None:
            say(words)

    def _say_views(self) -> None:
        """Say the new views, once a node: what becomes of the job is in the log of each."""
        history = self.agreement.history
        for number, view in enumerate(history):
            if view.epoch > self._said_epoch:
                self._said_epoch = view.epoch
                self.changes.follow(view)
                words = words_of_view(view, history[:number])
                if words is not None and self.speaks_for_node:
                    say(words)

    def _say_address(self) -> None:
        """Say the job's address, once a node, and not of a job that is refused before it begins."""
        if self.speaks_for_node:
            at = self.peers[self._slot].data
            say(f"the job: `elaswave status --connect {at}`; to join it `elaswave run --join {at}`")

    @property
    def speaks_for_node(self) -> bool:
        """True if this supervisor is the first of those on its node that live."""
        own = self.peers[self._slot].node
        first = (one.slot for one in self.peers if one.node == own and one.slot not in self.lost)
        return next(first, self._slot) == self._slot

    def _beat(self) -> None:
        """Send heartbeats and look for supervisors that have been silent too long.

        The leader and each other one watch each other; the next leader begins with that. Where
        the leader is silent, its node may be gone: those beside it are asked whether they are
        there, so that not each of them leads, and is waited for, in turn.
        """
        with self._vote():
            pass  # the node follows that one by now
        now_s = time.monotonic()
        late_s = now_s - self._beat_due_s
        leader = self.agreement.leader
        # A leader that has just been let in may have no link yet.
        watched = self._channels if leader == self._slot else {leader} & self._channels.keys()
        self._heard_s = {peer: self._heard_s.get(peer, now_s) for peer in watched}
        self._hangs.begin_beat()
        if leader == self._slot:
            self._waits.look(self._hangs.pages)
        lease_s = lease_clock_s()
        self._lend(lease_s)
        number = self._lease.send(now_s=lease_s)
        for peer in watched:
            heard, at_s = self._last_beats.get(peer, (0, lease_s))
            # Its node speaks for another leader, and so not for this one's time.
            heard = heard if self.agreement.follows else 0
            beat = Beat(
                n=number,
                heard=heard,
                left=self._lease.left_s(at_s),
                page=self._hangs.page,
                waiting=self._hangs.waiting_for(peer),
            )
            self._channels[peer].send(beat)
        if late_s > self._heartbeat.every_s:
            # It is this process that did not run: what the others sent is still unread.
            since_s = now_s - self._heartbeat.every_s
            self._heard_s = {peer: max(at_s, since_s) for peer, at_s in self._heard_s.items()}
            self._asked.clear()
        else:
            self._lose_the_silent(leader, now_s)
            self.unheard.look(self._silences(), speaks=self.speaks_for_node)
        self._beat_due_s = now_s + self._heartbeat.every_s
        self._reactor.after(self._heartbeat.every_s, self._beat)

    def _lose_the_silent(self, leader: int, now_s: float) -> None:
        silent_s = {peer: now_s - at_s for peer, at_s in self._heard_s.items()}
        missed = silent_s.get(leader, 0.0) > 2 * self._heartbeat.every_s
        beside = self._beside(leader) if missed else []
        self._asked = {peer: self._asked.get(peer, 0) for peer in beside}
        limits_s = {
            peer: self._resent.limit_s(peer, self._channels[peer].answers, now_s=now_s)
            for peer in silent_s
        }
        lost = [peer for peer in silent_s if silent_s[peer] > limits_s[peer]]
        for peer in lost:
            if not self._channels[peer].closed:
                was = f"was silent for {limits_s[peer]:g} s"
                self._lose(peer, f"its supervisor (pid {self.peers[peer].pid}) {was}")
        for peer, count in self._asked.items():
            if leader in lost and count >= _ASKS:
                was = f"did not answer when worker {leader} of its node was silent"
                self._lose(peer, f"its supervisor (pid {self.peers[peer].pid}) {was}")
            else:
                self._asked[peer] += 1
                self._channels[peer].send(Ask())

    def _silences(self) -> dict[Peer, float]:
        """Return how long the supervisors of other nodes have answered nothing."""
        own = self.peers[self._slot].node
        open_ones = ((self.peers[n], one) for n, one in self._channels.items() if not one.closed)
        return {peer: one.answers.silent_s for peer, one in open_ones if peer.node != own}

    def _unheard_now(self) -> tuple[int, ...]:
        """Return the slots of those whose machines do not answer the kernel's questions."""
        return tuple(peer.slot for peer, silent_s in self._silences().items() if silent_s > APART_S)

    def _beside(self, leader: int) -> list[int]:
        """Those on the node of the leader, which is another one, to which a link stands."""
        links = [slot for slot, channel in self._channels.items() if not channel.closed]
        node = self.peers[leader].node
        return [slot for slot in links if slot != leader and self.peers[slot].node == node]

    def _take_beat(self, peer: int, beat: Beat) -> None:
        """Note a beat, and extend the lease from the own beat that the sender has heard.

        The lease says for how long this supervisor may count on being in the job.
        """
        now_s = lease_clock_s()
        self._last_beats[peer] = beat.n, now_s
        if peer == self.agreement.leader:
            self._lease.granted(beat.heard, left_s=beat.left, now_s=now_s)
        else:
            self._lease.acknowledged(self.peers[peer].node, beat.heard, now_s=now_s)
        self._lend(now_s)

    def _lend(self, now_s: float) -> None:
        """Tell the trainer until when it may act for the job, both by the clock of leases."""
        own = self.peers[self._slot].node
        if self.agreement.leads:
            self._lease.lead(own=own, voters=set(self.agreement.committed.nodes), now_s=now_s)
        if self._lease.until_s > 0:
            self._trainer_side.lend(self._lease.until_s)

    def _set_alarm(self) -> None:
        """Have `settle` run at the agreement's next deadline."""
        deadline_s = self.agreement.deadline_s()
        if deadline_s is not None and deadline_s != self._alarm_s:
            self._reactor.after(max(0.0, deadline_s - time.monotonic()), _wake)
        self._alarm_s = deadline_s


def _wake() -> None:
    """A timer that only ends the wait: `settle` runs after each batch of events anyway."""
