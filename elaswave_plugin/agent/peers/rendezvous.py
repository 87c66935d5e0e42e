"""The agents of a launch find each other once, at the first node's address."""

import contextlib
import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.agent.peers.arrivals import Arrivals
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.core.layout.reserve import NOWHERE
from elaswave_plugin.errors import AgreementError, ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import is_readable
from elaswave_plugin.ipc.secret import SECRET_FILE, Kind, Secret, prove
from elaswave_plugin.ipc.wire import receive_frame, send_frame

_FIRST_FRAME_S = 5.0
_REDIAL_S = 0.05
_LONGEST_OPENING_BYTES = 4096
_FIRST_TOLD_S, _TOLD_EVERY_S = 10.0, 30.0
_MOST_NODES = 8
_ANY = ("", "0.0.0.0", "::")
# An address that nobody has (RFC 5737): the way there is the way out of this machine.
_OUTSIDE = "192.0.2.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSpec:
    """The meeting point of a job's agents, and the identity of this one there.

    Node 0 listens at the first of `ports` that is free; the others look for it at all of them, and
    know by `job` that it is theirs and no stranger's. `slots`: those of this node; `world_size`: of
    all nodes together; `reserve`: slots beyond those that meet. `width`: workers of each node, 0
    where nobody has said so. `hands_out`: node 0 gives the secret to who asks for it before all
    have met.
    """

    node: int
    slots: tuple[int, ...]
    world_size: int
    host: str
    ports: tuple[int, ...]
    job: str
    timeout_s: float
    secret: Secret
    hands_out: bool = False
    reserve: int = 0
    width: int = 0

    @property
    def where(self) -> str:
        """The address, for people."""
        last = f" to {self.ports[-1]}" if len(self.ports) > 1 else ""
        return f"{self.host}:{self.ports[0]}{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The node of each slot, the address of each node's agent, and links with some of them.

    The slots of the reserve come last, and no node has them. Node 0 has links with all others, and
    they with it.
    """

    of_slots: tuple[int, ...]
    addresses: dict[int, str]
    links: list[tuple[Peer, socket.socket]]


class EndedEarlyError(AgreementError):
    """An agent ended before all had met; what it died of it would die of again."""

    early = True

    def __init__(self, node: int | str, why: str = "") -> None:
        """``node``: whose it was, or what another agent has said of it."""
        seen = f": {why}" if why else ""
        told = f"the agent of node {node} ended before all had come{seen}"
        super().__init__(node if isinstance(node, str) else told)


class MeetingWait:
    """Says what the agent of a node waits for, after 10 s and every 30 s from then on."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._due_s = self._began_s + _FIRST_TOLD_S

    @property
    def left_s(self) -> float:
        """The seconds until it is to be said."""
        return max(0.0, self._due_s - time.monotonic())

    def tell(self, for_what: str) -> None:
        """Say it where it is time."""
        if self.left_s > 0:
            return
        now_s = time.monotonic()
        self._due_s = now_s + _TOLD_EVERY_S
        say(f"waiting for {now_s - self._began_s:.0f} s for {for_what}")


def name_slots(rendezvous: RendezvousSpec, slots: Sequence[int]) -> str:
    """Workers, by their nodes where the size of a node is known."""
    if not rendezvous.width:
        return f"worker{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"
    nodes: dict[int, list[int]] = {}
    for slot in slots:
        nodes.setdefault(slot // rendezvous.width, []).append(slot)
    said = [
        f"node {node} (worker{'s' if len(some) > 1 else ''} {', '.join(map(str, some))})"
        for node, some in nodes.items()
    ]
    more = f" and {len(said) - _MOST_NODES} more nodes" if len(said) > _MOST_NODES else ""
    return ", ".join(said[:_MOST_NODES]) + more


def own_host(
    host: str,
    port: int,
    *,
    listener: socket.socket | None,
    timeout_s: float,
    several: bool = False,
) -> str:
    """The address of this machine at which the other workers of the job reach it.

    That is where node 0 listens; elsewhere, and where node 0 listens on all its addresses, it is
    this end of the way to node 0 at `host`; of `several` machines, for a name that this one gives
    itself alone, of the way out of it. No packet is sent for it.
    Raises ConfigurationError where `host` is not known within `timeout_s`, or cannot be reached.
    """
    if listener is not None and listener.getsockname()[0] not in _ANY:
        own = str(listener.getsockname()[0])
        try:
            _way_to(own, port)
        except OSError as error:
            raise ConfigurationError(
                f"this machine cannot reach its own address {own} ({error.strerror}): is the "
                "loopback interface up? `ip link set lo up`"
            ) from error
        return own
    if host in _ANY:
        return socket.gethostbyname(socket.gethostname())
    if several and _is_own_name(host):
        with contextlib.suppress(OSError):  # without a way out there are no other machines
            return _way_to(_OUTSIDE, port)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return _way_to(host, port)
        except OSError as error:
            if time.monotonic() + _REDIAL_S > deadline_s:
                raise ConfigurationError(
                    f"the address of node 0 is {host!r}, to which this machine has no route "
                    f"({error}); give one that every node can reach as --master-addr"
                ) from error
        # Nothing can be waited for: the name of node 0 may become known after its start.
        time.sleep(_REDIAL_S)


def way_out() -> str:
    """Return this machine's address for others; the loopback one where it has no way out."""
    try:
        return _way_to(_OUTSIDE, 1)
    except OSError:
        return "127.0.0.1"


def _is_own_name(host: str) -> bool:
    """Return whether `host` is a name for an address that other machines cannot reach.

    False for a number, and for localhost.

    Debian's /etc/hosts gives the machine's own name 127.0.1.1, and torchrun names node 0 by it.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return False
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return host != "localhost" and all(one.startswith("127.") for one in found)


def _way_to(host: str, port: int) -> str:
    """This machine's address on the way to `host`, of the first family that has one."""
    failure = OSError("it has no address")
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                failure = error
            else:
                return str(probe.getsockname()[0])
    raise failure


def host_meeting(rendezvous: RendezvousSpec, listener: socket.socket, own: Peer) -> Meeting:
    """Wait, as node 0, for all others at `listener`.

    Raises AgreementError when someone stays away.
    """
    deadline_s = time.monotonic() + rendezvous.timeout_s
    homes = dict.fromkeys(rendezvous.slots, rendezvous.node)
    addresses = {own.node: own.data}
    links: dict[int, tuple[Peer, socket.socket]] = {}
    waiting = MeetingWait()
    opening = _opening(rendezvous)
    with Arrivals(
        listener,
        rendezvous.secret,
        Kind.MEETING,
        opening=opening,
        hands_out=rendezvous.hands_out,
    ) as arrivals:
        while len(homes) < rendezvous.world_size:
            missing = sorted(set(range(rendezvous.world_size)) - homes.keys())
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise AgreementError(
                    f"{name_slots(rendezvous, missing)} did not come"
                    f" within {rendezvous.timeout_s:g} s{arrivals.refused_text}"
                )
            waiting.tell(f"{name_slots(rendezvous, missing)} to come to {rendezvous.where}")
            for sock, greeting in arrivals.greetings(min(left_s, waiting.left_s)):
                if not greeting:
                    raise EndedEarlyError(arrivals.watched[sock])
                if "gone" in greeting:
                    raise EndedEarlyError(greeting["node"], greeting["gone"])
                refused = _why_not(greeting, rendezvous, homes)
                if refused is not None:
                    send_frame(sock, {"error": refused})
                    sock.close()
                    continue
                peer: Peer = from_json(Peer, greeting.get("peer"))
                homes |= dict.fromkeys(greeting["slots"], peer.node)
                addresses[peer.node] = peer.data
                links[peer.node] = peer, sock
                arrivals.watch(peer.node, sock)
    of_slots = (*(homes[slot] for slot in sorted(homes)), *(NOWHERE,) * rendezvous.reserve)
    for _, sock in links.values():
        send_frame(sock, {"of_slots": of_slots, "addresses": addresses, "peer": own})
    return Meeting(of_slots=of_slots, addresses=addresses, links=list(links.values()))


def _opening(rendezvous: RendezvousSpec) -> dict[str, Any]:
    """Return the first frame of node 0 to every connection, before any proof."""
    return {
        "job": rendezvous.job,
        "fingerprint": rendezvous.secret.fingerprint,
        "hands_out": rendezvous.hands_out,
    }


def _why_not(
    greeting: dict[str, Any], rendezvous: RendezvousSpec, homes: Mapping[int, int]
) -> str | None:
    """Say why an agent has no place in the meeting; None for one that is awaited."""
    if greeting.get("world_size") != rendezvous.world_size:
        return (
            f"its job has {greeting.get('world_size')} workers and that of node 0 has "
            f"{rendezvous.world_size}: give every node the same numbers of nodes and of workers"
        )
    if greeting["node"] in homes.values() or homes.keys() & {*greeting["slots"]}:
        return (
            f"another agent has come as node {greeting['node']}, or with a worker of it: give"
            " every node a rank of its own"
        )
    if greeting.get("reserve") != rendezvous.reserve:
        return (
            f"its reserve is {greeting.get('reserve')}, that of node 0 is {rendezvous.reserve}: "
            "give every node the same --reserve"
        )
    return None


def join_meeting(rendezvous: RendezvousSpec, own: Peer) -> Meeting:
    """Any other node: go to node 0, and wait there until all have come.

    Raises AgreementError where one is missing, and ConfigurationError where this one is not wanted.
    """
    deadline_s = time.monotonic() + rendezvous.timeout_s
    with contextlib.ExitStack() as undo:
        first = undo.enter_context(_look_for_first(rendezvous, deadline_s))
        answer = _greet(first, own, rendezvous, deadline_s)
        undo.pop_all()
    addresses = {int(node): address for node, address in answer["addresses"].items()}
    peer: Peer = from_json(Peer, answer["peer"])
    return Meeting(of_slots=tuple(answer["of_slots"]), addresses=addresses, links=[(peer, first)])


def _greet(
    first: socket.socket, own: Peer, rendezvous: RendezvousSpec, deadline_s: float
) -> dict[str, Any]:
    """Greet node 0, and return what it answers once all have come."""
    sizes = {"world_size": rendezvous.world_size, "reserve": rendezvous.reserve}
    waiting = MeetingWait()
    try:
        send_frame(first, {"node": own.node, "slots": rendezvous.slots, "peer": own, **sizes})
        while not is_readable(first, waiting.left_s):
            if (
                time.monotonic() > deadline_s + _FIRST_FRAME_S
            ):  # node 0 says more, if a little later
                break
            waiting.tell("all to come: node 0 names the missing workers")
        answer = receive_frame(first, _FIRST_FRAME_S)
    except TimeoutError as error:
        raise AgreementError(f"not all came within {rendezvous.timeout_s:g} s") from error
    except OSError as error:
        raise EndedEarlyError(0, str(error)) from error
    if "over" in answer:
        raise (EndedEarlyError if answer["early"] else AgreementError)(answer["over"])
    if "error" in answer:
        raise ConfigurationError(f"node {rendezvous.node} is refused: {answer['error']}")
    return answer


def tell_of_end(rendezvous: RendezvousSpec, why: str) -> None:
    """Tell node 0, where it is there already, that this node's agent has ended.

    For the guardian of one that may not have come to the meeting.
    """
    for port in rendezvous.ports:
        with (
            contextlib.suppress(OSError, ValueError),
            _dial(rendezvous, port) as sock,
        ):
            send_frame(sock, {"node": rendezvous.node, "gone": why})
            return


def listen_at(host: str, port: int, *, several: bool = False) -> socket.socket:
    """A listener of a meeting; an OSError it raises has the plain reason as strerror.

    On all addresses where `several` machines meet and others know `host` by another one.
    """
    host = "" if several and host and _is_own_name(host) else host
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno is not None and error.errno > 0:
            error.strerror = os.strerror(error.errno)  # without what create_server adds
        raise


def _look_for_first(rendezvous: RendezvousSpec, deadline_s: float) -> socket.socket:
    """Connect to node 0, which may start later than we do, at whichever of its ports it is."""
    first, *others = rendezvous.ports
    # The first one is the likeliest by far, and a silent stranger at another one takes a while.
    in_turn = [port for other in others for port in (first, other)] or [first]
    waiting = MeetingWait()
    for port in itertools.cycle(in_turn):
        waiting.tell(f"node 0 to answer at {rendezvous.where}")
        try:
            return _dial(rendezvous, port)
        except ConfigurationError:
            raise  # it is a ValueError, and no stranger's
        except (OSError, ValueError) as error:
            if time.monotonic() + _REDIAL_S > deadline_s:
                raise AgreementError(
                    f"the agent of node 0 does not answer at {rendezvous.where} "
                    f"within {rendezvous.timeout_s:g} s ({error})"
                ) from error
        if port == first:
            # Nothing can be waited for: the listener does not exist yet.
            time.sleep(_REDIAL_S)
    raise AssertionError("unreachable")


def _dial(rendezvous: RendezvousSpec, port: int) -> socket.socket:
    """Connect to the agent of this job that listens there, and prove the secret.

    Raises OSError where nobody listens or speaks, ValueError where a stranger does, and
    ConfigurationError where the job there has another secret.
    """
    sock, opening = open_to_first(rendezvous.host, port, rendezvous.job)
    try:
        if opening.get("fingerprint") != rendezvous.secret.fingerprint:
            raise ConfigurationError(
                f"the job's secret on node {rendezvous.node} is not that of node 0: give every"
                f" node the same file as {SECRET_FILE}"
            )
        prove(sock, rendezvous.secret, Kind.MEETING, node=rendezvous.node)
    except BaseException:
        sock.close()
        raise
    return sock


def open_to_first(host: str, port: int, job: str) -> tuple[socket.socket, dict[str, Any]]:
    """Connect to node 0's listener, and return what it says to everybody.

    Raises OSError where none listens or speaks, ValueError where a stranger does.
    """
    sock = socket.create_connection((host, port), timeout=_FIRST_FRAME_S)
    try:
        opening = receive_frame(sock, _FIRST_FRAME_S, longest_bytes=_LONGEST_OPENING_BYTES)
        if opening.get("job") != job:
            raise ValueError(f"job {opening.get('job')!r} is at port {port}, not {job!r}")
    except BaseException:
        sock.close()
        raise
    return sock, opening
