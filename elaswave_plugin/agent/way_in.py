"""The way of a node into a running job: its agent finds the job, and is let in.

It asks any of the job's agents for the others, asks the leader for slots
(`core/agreement/quorum.py`), and opens a link with it, by which it is told what it has to know.
Standard library only; blocks, since nothing runs beside it yet.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_plugin.agent.common import AgentSpec
from elaswave_plugin.agent.peers.links import greet
from elaswave_plugin.core.agreement.messages import Welcome
from elaswave_plugin.core.codec import UnreadableMessageError, from_json
from elaswave_plugin.core.layout.reserve import built_among
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_REQUEUE, AgreementError
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.wire import Frame, connect, receive_frame

_ANSWER_S = 5.0
_ASK_AGAIN_S = 0.1


class SlotRefusedError(AgreementError):
    """The job does not let this node in; `exit_code`: what its agent ends with."""

    def __init__(self, why: str, exit_code: int = EXIT_REQUEUE) -> None:
        super().__init__(why)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """A running job, as one of its agents tells it (see `Reception.answer_roster`)."""

    record: Frame

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that have no agent."""
        return tuple(self.record["free"])

    @property
    def vacant(self) -> tuple[int, ...]:
        """The free slots in which no worker has been: the job's reserve."""
        return tuple(self.record["vacant"])

    @property
    def leaving(self) -> tuple[int, ...]:
        """The slots whose worker was told to leave, and whose agent has them still."""
        return tuple(self.record["told_to_leave"])

    @property
    def leader(self) -> str:
        """The address of the agent that leads."""
        return str(self.record["addresses"][str(self.record["leader"])])

    @property
    def contacts(self) -> tuple[str, ...]:
        """The addresses of the agents that live."""
        return tuple(self.record["addresses"].values())

    @property
    def width(self) -> int:
        """The number of slots."""
        return len(self.record["nodes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A node that was let in: the spec with its number, what it has to know, its link."""

    spec: AgentSpec
    welcome: Welcome
    kept: Frame
    links: list[tuple[Peer, socket.socket]]


def ask_roster(contacts: Sequence[str], secret: Secret, *, timeout_s: float = _ANSWER_S) -> Roster:
    """Ask the leader of the job, found by way of any of the contacts, "host:port" each.

    Raises OSError where none answers, and of those ConnectionRefusedError only where none is there
    any more at all.
    """
    failure: OSError = ConnectionRefusedError("no agent is there")
    for contact in contacts:
        try:
            found = _roster_at(contact, timeout_s, secret)
        except OSError as error:
            if isinstance(failure, ConnectionRefusedError):
                failure = error
            continue
        try:
            # The first one asked may not have heard of the latest losses.
            return _roster_at(found.leader, timeout_s, secret)
        except OSError as error:
            failure = TimeoutError(f"the leader does not answer: {error}")
    raise failure


def _roster_at(address: str, timeout_s: float, secret: Secret) -> Roster:
    answer = request(address, {"t": "roster"}, timeout_s, secret)
    if answer.get("t") != "roster":
        raise ConnectionError("another program answers there, not an agent of a job")
    return Roster(record=answer)


def seek_admission(spec: AgentSpec, address: str, *, life: int) -> Admitted:
    """Take the wanted slots, or others that are free. Raises SlotRefusedError.

    Also where the node is not let in within the time for a start. `address`: of the own server.
    """
    secret, timeout_s = spec.rendezvous.secret, spec.rendezvous.timeout_s
    deadline_s = time.monotonic() + timeout_s
    contacts, wanted, why = spec.joins, spec.wanted, "no agent of the job answers"
    while time.monotonic() < deadline_s:
        try:
            roster = ask_roster(contacts, secret)
            contacts = roster.contacts
            if not {*wanted} <= {*roster.free}:
                # Others that joined at once were offered the same slots.
                wanted = roster.free[: len(spec.wanted)]
            if len(wanted) < len(spec.wanted):
                raise SlotRefusedError("others have taken the free slots; it may try again")
            return _attempt(spec, roster, wanted, address, life)
        except ConnectionRefusedError as error:
            why = "no agent of the job is there any more"
            # Where the job has a record, that tells what became of it.
            code = EXIT_CONFIGURATION if spec.job_place is None else EXIT_REQUEUE
            raise SlotRefusedError(why, code) from error
        except OSError as error:
            # An agent has gone meanwhile, and may not be lost for sure: begin again.
            why = str(error)
        # Nothing can be waited for: the others are about to notice who is gone.
        time.sleep(_ASK_AGAIN_S)
    raise SlotRefusedError(f"it was not let in within {timeout_s:g} s: {why}")


def _attempt(
    spec: AgentSpec, roster: Roster, wanted: Sequence[int], address: str, life: int
) -> Admitted:
    """Ask once. Raises OSError where it is to be asked again, else SlotRefusedError."""
    secret, node = spec.rendezvous.secret, int(roster.record["unused_node"])
    asked = {"t": "admit", "node": node, "slots": list(wanted), "address": address}
    answer = request(roster.leader, asked, _ANSWER_S, secret)
    if answer["reason"] is not None:
        if answer["later"] or "has an agent" in answer["reason"]:
            raise TimeoutError(answer["reason"])
        raise SlotRefusedError(answer["reason"])
    own = Peer(node=node, pid=os.getpid(), life=life, data=address)
    peer, sock = _link(own, roster.leader, secret)
    try:
        welcome = _welcome(sock)
        kept = request(roster.leader, {"t": "kept"}, _ANSWER_S, secret)
    except BaseException:
        sock.close()
        raise
    slots = tuple(worker.slot for worker in welcome.workers)
    placed = replace(
        spec,
        rendezvous=replace(spec.rendezvous, node=node, slots=slots),
        envs=tuple(
            env_in({**env, **roster.record["env"]}, slot, node)
            for env, slot in zip(spec.envs, slots, strict=True)
        ),
    )
    return Admitted(spec=placed, welcome=welcome, kept=kept, links=[(peer, sock)])


def env_in(env: Mapping[str, str], slot: int, node: int) -> dict[str, str]:
    """An environment with what its slot and node make of torchrun's variables."""
    # A script knows ranks of the launch only.
    rank = built_among(slot, range(int(env["WORLD_SIZE"]))).index(slot)
    of_the_place = {"RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": node, "NODE_RANK": node}
    return {**env, **{name: str(value) for name, value in of_the_place.items()}}


def _link(own: Peer, address: str, secret: Secret) -> tuple[Peer, socket.socket]:
    sock = connect(address, _ANSWER_S)
    try:
        prove(sock, secret, Kind.SERVER, node=own.node)
        peer, _ = greet(sock, own, 0, _ANSWER_S)
        return peer, sock
    except BaseException:
        sock.close()
        raise


def _welcome(sock: socket.socket) -> Welcome:
    """Read what the leader tells first on a new link; raises OSError."""
    frame = receive_frame(sock, _ANSWER_S)
    while frame.get("t") != "welcome":  # a beat may come before
        frame = receive_frame(sock, _ANSWER_S)
    try:
        welcome: Welcome = from_json(Welcome, frame)
    except UnreadableMessageError as error:
        raise ConnectionError(f"the leader {error}") from error
    return welcome
