"""The way of a supervisor into a running job: it finds the job, and is let in.

It asks any of them for the others, opens a link to every one that lives, and asks the leader to be
let in (`core/agreement/join_rule.py`). Standard library only; blocks, since nothing runs beside it
yet.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.agreement.messages import Welcome
from elaswave_plugin.core.codec import UnreadableMessageError, from_json
from elaswave_plugin.core.layout.reserve import vacant
from elaswave_plugin.errors import AgreementError
from elaswave_plugin.ipc.handshake import Kind, prove
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame, receive_frame, send_frame
from elaswave_plugin.supervisor.peers.rendezvous import Meeting

_ANSWER_S = 5.0
_ASK_AGAIN_S = 0.1


class SlotRefusedError(AgreementError):
    """The job does not let this supervisor in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """A running job, as one of its supervisors tells it (see `Reception.answer_roster`)."""

    record: Frame

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All supervisors by slot, the lost ones among them."""
        return tuple(from_json(Peer, peer) for peer in self.record["peers"])

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that have no supervisor."""
        return tuple(self.record["lost"])

    @property
    def vacant(self) -> tuple[int, ...]:
        """The free slots in which no worker has been: the job's reserve."""
        return vacant([peer.node for peer in self.peers])

    @property
    def living(self) -> tuple[Peer, ...]:
        """The supervisors that live, by slot."""
        return tuple(peer for peer in self.peers if peer.slot not in self.free)

    @property
    def leaving(self) -> tuple[int, ...]:
        """The slots whose worker was told to leave, and whose supervisor is there still."""
        told = self.record["told_to_leave"]
        return tuple(one.slot for one in self.living if one.slot in told)

    @property
    def leader(self) -> Peer:
        """The supervisor that leads."""
        return self.peers[self.record["leader"]]

    def node_for(self, machine: str) -> int:
        """The number of a newcomer's node: that of the only node of its machine that lives.

        Else one that no node of the job has had.
        """
        nodes = {peer.node for peer in self.living if peer.machine == machine}
        return nodes.pop() if len(nodes) == 1 else int(self.record["unused_node"])


def ask_roster(
    contacts: Sequence[str],
    secret: Secret,
    *,
    standby: dict[str, Any] | None = None,
    timeout_s: float = _ANSWER_S,
) -> Roster:
    """Ask the leader of the job, found by way of any of the contacts, "host:port" each.

    `standby` describes the asker, where it waits for a slot. Raises OSError where none answers,
    and of those ConnectionRefusedError only where none is there any more at all.
    """
    failure: OSError = ConnectionRefusedError("no supervisor is there")
    for contact in contacts:
        try:
            found = _roster_at(contact, None, timeout_s, secret)
        except OSError as error:
            if isinstance(failure, ConnectionRefusedError):
                failure = error
            continue
        try:
            # The first one asked may not have heard of the latest losses.
            return _roster_at(found.leader.data, standby, timeout_s, secret)
        except OSError as error:
            failure = TimeoutError(f"the leader does not answer: {error}")
    raise failure


def _roster_at(
    address: str, standby: dict[str, Any] | None, timeout_s: float, secret: Secret
) -> Roster:
    answer = request(address, {"t": "roster", "standby": standby}, timeout_s, secret)
    if answer.get("t") != "roster":
        raise ConnectionError("another program answers there, not a supervisor of a job")
    return Roster(record=answer)


def seek_admission(
    own: Peer, contacts: Sequence[str], secret: Secret, *, timeout_s: float
) -> tuple[Meeting, Frame]:
    """Take the slot `own.slot`; returns the links to the others, and what was kept for newcomers.

    Raises SlotRefusedError, also where it is not let in within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    why = "no supervisor of the job answers"
    while time.monotonic() < deadline_s:
        links: dict[tuple[int, int], socket.socket] = {}
        try:
            return _attempt(own, contacts, secret, links, deadline_s)
        except OSError as error:
            # A supervisor has gone meanwhile, and may not be lost for sure: begin again.
            why = str(error)
            for sock in links.values():
                sock.close()
        # Nothing can be waited for: the others are about to notice who is gone.
        time.sleep(_ASK_AGAIN_S)
    raise SlotRefusedError(f"worker {own.slot} was not let in within {timeout_s:g} s: {why}")


def _attempt(
    own: Peer,
    contacts: Sequence[str],
    secret: Secret,
    links: dict[tuple[int, int], socket.socket],
    deadline_s: float,
) -> tuple[Meeting, Frame]:
    while True:
        roster = _roster_of_living(own, contacts, secret)
        if own.slot not in roster.free:
            raise SlotRefusedError(f"worker {own.slot} has a supervisor again")
        for peer in roster.living:
            if (peer.slot, peer.pid) not in links:
                links[peer.slot, peer.pid] = _link(own, peer, secret)
        by_slot = {peer.slot: links[peer.slot, peer.pid] for peer in roster.living}
        asked = {"t": "admit", "peer": own, "linked": list(by_slot)}
        answer = request(roster.leader.data, asked, _ANSWER_S, secret)
        if answer["reason"] is None:
            break
        if not answer["later"]:
            raise SlotRefusedError(answer["reason"])
        if time.monotonic() > deadline_s:
            raise TimeoutError(answer["reason"])
        # It may be asked at any time; what it waits for (a step's end) takes longer than this.
        time.sleep(_ASK_AGAIN_S)
    welcome = _welcome(roster, own, by_slot)
    # The view may be older than the losses, and name our predecessor.
    first = next(slot for slot in roster.record["ranks"] if slot in by_slot)
    kept = request(roster.peers[first].data, {"t": "kept"}, _ANSWER_S, secret)
    peers = tuple(own if peer.slot == own.slot else peer for peer in roster.peers)
    return Meeting(peers=peers, links=by_slot, welcome=welcome), kept


def _roster_of_living(own: Peer, contacts: Sequence[str], secret: Secret) -> Roster:
    try:
        return ask_roster(contacts, secret)
    except ConnectionRefusedError as error:
        why = f"worker {own.slot} was not let in: no supervisor of the job is there any more"
        raise SlotRefusedError(why) from error


def _link(own: Peer, peer: Peer, secret: Secret) -> socket.socket:
    host, _, port = peer.data.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=_ANSWER_S)
    try:
        prove(sock, secret, Kind.SERVER, node=own.node)
        send_frame(sock, {"t": "link", "peer": own})
        answer = receive_frame(sock, _ANSWER_S)
        if answer.get("t") != "linked":
            raise ConnectionError(f"worker {peer.slot}: {answer.get('error', 'no link')}")
    except BaseException:
        sock.close()
        raise
    return sock


def _welcome(roster: Roster, own: Peer, links: dict[int, socket.socket]) -> Welcome:
    """Read the leader's welcome, once all living supervisors use our links; raises OSError."""
    for sock in links.values():
        receive_frame(sock, _ANSWER_S)  # "admitted"
    frame = receive_frame(links[roster.leader.slot], _ANSWER_S)
    try:
        welcome: Welcome = from_json(Welcome, frame)
    except UnreadableMessageError as error:
        raise ConnectionError(f"the leader {error}") from error
    if {*welcome.lost, own.slot, *links} != {peer.slot for peer in roster.peers}:
        raise ConnectionError("the members of the job have changed")
    return welcome
