"""Listens for a worker and dials another one: over TCP, or over a Unix socket on one host."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

from elaswave_plugin.ipc.handshake import is_same_user
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
