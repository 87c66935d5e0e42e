"""The connections of a worker, one a pair: handshakes, crossings, early comers."""

import errno
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from elaswave_plugin.communicator.links.connection import Connection, MessageSide, State
from elaswave_plugin.communicator.links.frames import Hello
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import silence
from elaswave_plugin.ipc.secret import (
    Accepting,
    Dialling,
    HandshakeError,
    Kind,
    Secret,
    Strangers,
    is_same_user,
)
from elaswave_plugin.ipc.silence import have_probed

_BACKLOG = 1024
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_PAUSE_S = 0.001
_SEND_BUFFER_BYTES = 1 << 20
# A Unix socket takes a fifth of a frame by default: each frame would be many writes.


class Listeners:
    """The two listening sockets of a worker under one address, "host:port".

    Workers with equal hosts see the same network, where a Unix socket of the abstract namespace
    stands under a name that follows from the address. It moves a byte for two thirds of what TCP
    needs.
    """

    def __init__(self, host: str) -> None:
        """Listen on an ephemeral port of `host`. Raises OSError."""
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._far = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = f"{host}:{self._far.getsockname()[1]}"
        self._near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._near.bind(_name(self.address))
        self._near.listen(_BACKLOG)
        for listener in (self._far, self._near):
            listener.setblocking(False)
        self.descriptors = (self._far.fileno(), self._near.fileno())

    def accept_all(self) -> Iterator[socket.socket]:
        """Yield the connections that wait at either door, as long as descriptors are left."""
        for listener in (self._far, self._near):
            while True:
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, InterruptedError):
                    break
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    # They go on waiting, and the door stays readable: not at a core's full speed.
                    time.sleep(_NO_ROOM_PAUSE_S)
                    break
                if listener is self._near and not is_same_user(sock):
                    sock.close()
                    continue
                yield _ready(sock)

    def dial(self, address: str) -> tuple[socket.socket, OSError | None]:
        """Return a socket that is on its way to this address, and the error if none answers."""
        host, _, port = address.rpartition(":")
        if host == self._host:
            near = _ready(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if near.connect_ex(_name(address)) == 0:
                return near, None
            near.close()  # the door is crowded, or the host is two behind one address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = _ready(socket.socket(family, socket.SOCK_STREAM))
        try:
            sock.connect((host, int(port)))
        except BlockingIOError:
            pass
        except OSError as error:
            return sock, error
        return sock, None

    def close(self) -> None:
        """Listen no more."""
        self._far.close()
        self._near.close()


def _name(address: str) -> str:
    return f"\0elaswave {address}"


def _ready(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    if sock.family is socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        have_probed(sock)
    return sock


_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


class Connections:
    """The connections of a worker in the epoch; every call is made under the table's lock.

    `links` has the connection that counts for each slot, also where it broke. `sockets` wakes
    the thread that polls it; what it tells of a descriptor is handed to `serve`.
    """

    def __init__(
        self,
        slot: int,
        host: str,
        *,
        secret: Secret,
        messages: MessageSide,
        on_broken: Callable[[Connection], None],
    ) -> None:
        """Listen on an ephemeral port of `host`; `on_broken(link)`: one that stood is no more."""
        self._slot = slot
        self._secret = secret
        self._messages = messages
        self._on_broken = on_broken
        self._epoch = 0
        self.addresses: Mapping[int, str] = {}
        self.links: dict[int, Connection] = {}
        self._by_descriptor: dict[int, Connection] = {}
        # Of a newer epoch than this one.
        self._parked: list[Connection] = []
        self._last_link: dict[int, int] = {}
        self._listeners = Listeners(host)
        self.address = self._listeners.address
        self._strangers = Strangers(self.address)
        self._look_at_s = 0.0
        self.sockets = select.epoll()
        for descriptor in self._listeners.descriptors:
            self.sockets.register(descriptor, _READ)

    def enter(self, epoch: int, addresses: Mapping[int, str]) -> None:
        """The members of this epoch listen at `addresses`: keep the links to them, close others."""
        self._epoch, self.addresses = epoch, dict(addresses)
        for slot, link in list(self.links.items()):
            if self.addresses.get(slot) != link.address or link.state is State.CLOSED:
                self._retire(link, "not a member of the view")
                del self.links[slot]
        parked, self._parked = self._parked, []
        for connection in parked:
            if connection.hello is not None and connection.state is State.PARKED:
                self.greeted(connection, connection.hello)

    def link_to(self, slot: int) -> Connection:
        """The link to a member, dialled where there is none. Raises LinkError for others."""
        return self.links.get(slot) or self._dial(slot)

    def write(self, link: Connection) -> None:
        """Send of the queue what the socket takes, and the rest as soon as it takes more."""
        try:
            link.write()
        except (BrokenPipeError, ConnectionResetError):
            # The peer has gone. What it sent before is still to be read, and its end comes after.
            self._watch(link, _READ)
            return
        except OSError as error:
            self._lost(link, error)
            return
        self._watch(link, _READ | _WRITE if link.outgoing else _READ)

    def drop_messages(self) -> None:
        """Forget what is queued, and throw away what is arriving of this epoch."""
        for link in self.links.values():
            link.drop_outgoing()
            if link.inbound is not None and link.inbound.header.epoch <= self._epoch:
                link.inbound.view = None

    def serve(self, descriptor: int, event: int) -> None:
        """Do what an event of `sockets` asks for; nothing for a descriptor that is not of here."""
        connection = self._by_descriptor.get(descriptor)
        if connection is not None:
            self._serve(connection, event)
        elif descriptor in self._listeners.descriptors:
            for sock in self._listeners.accept_all():
                self._strangers.came(sock)
                accepting = Accepting(self._secret, Kind.LINK)
                connection = Connection(self, self._messages, sock, State.INCOMING, accepting)
                self._admit(connection, _READ)

    def close(self) -> None:
        """Close everything."""
        for connection in list(self._by_descriptor.values()):
            connection.close("the link table was closed")
        self._by_descriptor.clear()
        self.links.clear()
        self._parked.clear()
        self._listeners.close()
        self.sockets.close()

    def end_late(self) -> float:
        """End links that are silent, and strangers that proved nothing in time.

        Returns the seconds until that is to be asked again.
        """
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + silence.LOOK_EVERY_S
            for link in [*self.links.values()]:
                if link.is_far and link.is_silent:
                    link.was_silent = True
                    self._retire(link, "broken: the other machine answers nothing")
                    self._on_broken(link)
        if not len(self._strangers):
            return silence.LOOK_EVERY_S
        self._strangers.end_late()
        late_s = self._strangers.next_end_s()
        return silence.LOOK_EVERY_S if late_s is None else min(silence.LOOK_EVERY_S, late_s)

    # ---- what connections call ---------------------------------------------------------------

    def greeted(self, connection: Connection, hello: Hello) -> None:
        """Take a greeted connection as the link to its slot, keep it for later, or refuse it."""
        connection.hello = hello
        if self.addresses.get(hello.slot) != hello.address:
            if hello.epoch > self._epoch:
                connection.state = State.PARKED
                self._watch(connection, 0)
                self._parked.append(connection)
            else:
                self._retire(connection, f"slot {hello.slot} is not a member")
            return
        old = self.links.get(hello.slot)
        if old is not None and self._overtaken(old, hello):
            self._retire(connection, "crossed with our own")
            return
        connection.peer = hello.slot
        connection.number = self._last_link[hello.slot] = hello.link
        connection.address = hello.address
        self.links[hello.slot] = connection
        if old is not None:
            connection.outgoing.extend(old.unstarted())
            old.outgoing.clear()
            self._retire(old, "replaced")
        try:
            connection.accept()
            self._watch(connection, _READ)
            self.write(connection)
            connection.parse()
        except (OSError, LinkError) as error:
            self._lost(connection, error)

    def proved(self, connection: Connection) -> None:
        """The dialling side has proved the secret."""
        self._strangers.is_known(connection.sock)

    def answered(self, connection: Connection) -> None:
        """The dialled side has proved the secret: send the greeting."""
        replaces = self._last_link.get(connection.peer, 0)
        connection.greet(Hello(self._slot, self.address, self._epoch, connection.number, replaces))

    def accepted(self, connection: Connection) -> None:
        """The peer took our connection as the link."""
        connection.state = State.OPEN
        self._last_link[connection.peer] = connection.number
        self.write(connection)

    # ---- inside ------------------------------------------------------------------------------

    def _dial(self, slot: int) -> Connection:
        address = self.addresses.get(slot)
        if address is None:
            raise LinkError(
                f"slot {slot} is not a member of view {self._epoch} "
                f"(members {sorted(self.addresses)})"
            )
        sock, error = self._listeners.dial(address)
        dialling = Dialling(self._secret, Kind.LINK)
        link = Connection(self, self._messages, sock, State.DIALLING, dialling, slot)
        link.address = address
        link.number = secrets.randbits(62) | 1
        self.links[slot] = link
        self._admit(link, _READ | _WRITE)
        if error is not None:
            self._lost(link, error)
        return link

    def _admit(self, connection: Connection, events: int) -> None:
        self._by_descriptor[connection.descriptor] = connection
        self.sockets.register(connection.descriptor, events)
        connection.watched = events

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched != events:
            self.sockets.modify(connection.descriptor, events)
            connection.watched = events

    def _open(self, link: Connection) -> None:
        try:
            link.open()
        except BlockingIOError:
            return  # an old event of another socket with this descriptor: not connected yet
        self._watch(link, _READ)

    def _overtaken(self, old: Connection, hello: Hello) -> bool:
        """Both sides dialled: the connection of the lower slot becomes (or is) the link."""
        if old.state is State.OPEN:
            return hello.replaces != old.number
        return old.state is not State.CLOSED and self._slot < hello.slot

    def _retire(self, connection: Connection, why: str) -> None:
        if connection.state is not State.CLOSED:
            self._by_descriptor.pop(connection.descriptor, None)
            self._strangers.is_known(connection.sock)
            self.sockets.unregister(connection.descriptor)
            connection.close(why)

    def _lost(self, connection: Connection, error: Exception) -> None:
        # A connection that ends while it greets may merely have crossed with the peer's own.
        broken = connection.state in (State.DIALLING, State.PROVING, State.OPEN)
        self._retire(connection, f"broken: {error}")
        if broken and self.links.get(connection.peer) is connection:
            self._on_broken(connection)

    def _serve(self, connection: Connection, event: int) -> None:
        try:
            if connection.state is State.DIALLING:
                self._open(connection)
            elif event & ~_WRITE:
                if connection.state is State.PARKED:
                    self._retire(connection, "gone before its view")
                else:
                    connection.read()
            if event & _WRITE and connection.state is State.OPEN:
                self.write(connection)
        except (OSError, LinkError) as error:
            if isinstance(error, HandshakeError) and connection.state is State.INCOMING:
                self._strangers.refuse(error)
            self._lost(connection, error)
