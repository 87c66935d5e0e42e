"""The links between the agents of a job: opened by the higher node, opened again where they break.

Every agent keeps links with the first nodes (`reporter.FIRST_NODES`), of which one leads; the
leader is so linked with all. A link that breaks is no loss yet: the next life of an agent is there
in a moment, at the same address. Where nobody listens there any more, the node's guardian is dead,
and its trainers with it.
"""

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.silence import have_probed
from elaswave_plugin.ipc.wire import Channel, Frame, connect, receive_frame, send_frame

LINK = "link"
DIAL_S = 2.0
AGAIN_S = 0.05


class Listener(Protocol):
    """The one that the links tell what happens to them."""

    def on_frame(self, node: int, frame: Frame) -> None:
        """Something was said by the agent of a node."""

    def on_bytes(self, node: int) -> None:
        """Something came from it, if not all of it yet."""

    @property
    def epoch(self) -> int:
        """The newest view that is known to be committed, which the other end is told."""

    def on_open(self, peer: Peer, epoch: int) -> None:
        """There is a new link with its agent, which knows of the view `epoch`."""

    def on_gone(self, node: int, evidence: str) -> None:
        """Nobody is there, or it counts this node out: said again as long as it is wanted."""


class LinkRefusedError(ConnectionError):
    """The agent at the other end does not count this node in."""


def greet(sock: socket.socket, own: Peer, epoch: int, timeout_s: float) -> tuple[Peer, int]:
    """Make a connection with another agent, which both have proved, the link between both.

    `epoch`: the newest view that is known here. Returns the other one, and the view that it knows.
    Raises LinkRefusedError, OSError, and ValueError or LookupError for an answer that is none.
    """
    send_frame(sock, {"t": LINK, "peer": own, "epoch": epoch})
    answer = receive_frame(sock, timeout_s)
    if answer.get("t") != "linked":
        raise LinkRefusedError(str(answer.get("error", "it answers something else")))
    return from_json(Peer, answer["peer"]), int(answer["epoch"])


@dataclass(slots=True)
class _Down:
    """A node without a link: what was seen of it last, and since when."""

    evidence: str
    since_s: float


class Links:
    """One agent's; all of it runs in the control thread, except the dialling."""

    def __init__(
        self,
        reactor: Reactor,
        own: Peer,
        listener: Listener,
        *,
        secret: Secret,
        grace_s: float,
    ) -> None:
        """`grace_s`: for so long a node whose link broke is dialled again and again, then seldom.

        Silence tells that it is lost: an agent may be followed by another one late, and one that is
        cut off acts for the job for as long as others wait for it (`core/agreement/lease.py`).
        """
        self._reactor = reactor
        self._own = own
        self._listener = listener
        self._secret = secret
        self._grace_s = grace_s
        self.channels: dict[int, Channel] = {}
        self._wanted: dict[int, str] = {}
        self._dialling: set[int] = set()
        self._down: dict[int, _Down] = {}

    def want(self, nodes: Mapping[int, str]) -> None:
        """Open links with these nodes, by address, where this end opens them; and keep them.

        The others come by themselves, or are dead: that is looked for after the grace.
        """
        self._wanted = dict(nodes)
        self._down = {node: down for node, down in self._down.items() if node in nodes}
        for node in nodes:
            if node not in self.channels and node not in self._down:
                opens = node < self._own.node
                self._miss(node, "it does not answer", after_s=0.0 if opens else self._grace_s)

    def take(self, peer: Peer, sock: socket.socket, epoch: int | None) -> None:
        """Use a connection that the agent of another node has opened.

        `epoch`: the view that it knows of; None at the launch, where nothing was said before.
        """
        old = self.channels.pop(peer.node, None)
        if old is not None:
            old.close()
        self._down.pop(peer.node, None)
        self.channels[peer.node] = Channel(
            self._reactor,
            sock,
            on_frame=partial(self._listener.on_frame, peer.node),
            on_close=partial(self._broke, peer.node, sock),
            on_bytes=partial(self._listener.on_bytes, peer.node),
        )
        have_probed(sock)
        if epoch is not None:
            self._listener.on_open(peer, epoch)

    def close(self, node: int) -> None:
        """Have no link with a node any more."""
        channel = self.channels.pop(node, None)
        if channel is not None:
            channel.close()
        self._down.pop(node, None)
        self._wanted.pop(node, None)

    def finish(self, goodbye: bytes, timeout_s: float) -> None:
        """Say goodbye on every link, so that no last word is lost, and close."""
        channels = list(self.channels.values())
        # Everybody has it before anybody sees a link close.
        for channel in channels:
            channel.send_encoded(goodbye)
        for channel in channels:
            channel.half_close(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        for channel in channels:
            channel.await_end(deadline_s)

    # ---- inside -------------------------------------------------------------------------------

    def _broke(self, node: int, sock: socket.socket, evidence: str) -> None:
        channel = self.channels.get(node)
        if channel is not None and channel.closed:
            del self.channels[node]
            if node in self._wanted:
                self._miss(node, evidence)

    def _miss(self, node: int, evidence: str, *, after_s: float = 0.0) -> None:
        """There is no link with a node: look for it."""
        self._down[node] = down = _Down(evidence, time.monotonic())
        if after_s:
            self._reactor.after(after_s, partial(self._look_again, node, down))
        else:
            self._look_for(node)

    def _look_for(self, node: int) -> None:
        """Dial in a thread: to open the link, or to see that somebody is there who will."""
        address = self._wanted.get(node)
        if address is None or node in self._dialling:
            return
        self._dialling.add(node)
        name = f"dial node {node}"
        threading.Thread(target=self._dial, args=(node, address), name=name, daemon=True).start()

    def _dial(self, node: int, address: str) -> None:
        try:
            sock = connect(address, min(DIAL_S, self._grace_s))
        except ConnectionRefusedError:
            gone = f"nobody listens at {address} any more"
            self._reactor.post(partial(self._is_dead, node, gone))
            return
        except OSError as error:
            self._reactor.post(partial(self._failed, node, str(error)))
            return
        try:
            prove(sock, self._secret, Kind.SERVER, node=self._own.node, timeout_s=DIAL_S)
            if node > self._own.node:
                sock.close()  # it opens the link
                then = partial(self._failed, node, None)
            else:
                peer, epoch = greet(sock, self._own, self._listener.epoch, DIAL_S)
                then = partial(self._dialled, peer, sock, epoch)
        except LinkRefusedError as error:
            sock.close()
            then = partial(self._refused, node, str(error))
        except (OSError, ValueError, LookupError) as error:
            sock.close()
            then = partial(self._failed, node, str(error))
        self._reactor.post(then)

    def _dialled(self, peer: Peer, sock: socket.socket, epoch: int) -> None:
        self._dialling.discard(peer.node)
        if peer.node in self._wanted:
            self.take(peer, sock, epoch)
        else:
            sock.close()

    def _refused(self, node: int, why: str) -> None:
        """It lives, and counts this node out; or has not heard yet that this one came."""
        down = self._down.get(node)
        if down is not None and time.monotonic() >= down.since_s + self._grace_s:
            self._listener.on_gone(node, why)
        self._failed(node, why)

    def _failed(self, node: int, why: str | None) -> None:
        self._dialling.discard(node)
        down = self._down.get(node)
        if down is not None:
            down.evidence = down.evidence if why is None else why
            is_new = time.monotonic() < down.since_s + self._grace_s
            pause_s = AGAIN_S if is_new else self._grace_s
            self._reactor.after(pause_s, partial(self._look_again, node, down))

    def _look_again(self, node: int, down: _Down) -> None:
        if self._down.get(node) is down:
            self._look_for(node)

    def _is_dead(self, node: int, why: str) -> None:
        self._dialling.discard(node)
        down = self._down.get(node)
        if down is not None:
            self._listener.on_gone(node, f"{down.evidence}; {why}")
            self._reactor.after(self._grace_s, partial(self._look_again, node, down))
