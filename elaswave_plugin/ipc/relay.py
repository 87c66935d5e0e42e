"""A connection to an agent that cannot be heard from here, by another that hears both.

Two nodes may lose each other's packets while the rest of the job hears them. What they exchange
passes through a third one then, which carries bytes and reads none of them: the ends prove the
job's secret to each other as over any connection. Standard library only.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Sequence

from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.wire import (
    Check,
    Frame,
    connect,
    probe_when_silent,
    receive_frame,
    send_frame,
)

RELAY = "relay"
# A machine of the same network that hears this one answers in milliseconds.
DIRECT_S = 1.5
# So many nodes are asked in turn.
_ASKED = 3
_CHUNK_BYTES = 1 << 18


def connect_by(
    address: str,
    relays: Sequence[str],
    *,
    secret: Secret,
    timeout_s: float,
    unheard: set[str] | None = None,
    check: Check | None = None,
) -> socket.socket:
    """Connect to an agent at "host:port", or by the first of ``relays`` that reaches it.

    ``unheard``: those of which nothing was heard before, which are tried last; it is added to.
    Raises OSError where none does, and what ``check`` raises.
    """
    if not relays:
        return connect(address, timeout_s, check)
    unheard = set[str]() if unheard is None else unheard
    if address not in unheard:
        try:
            return connect(address, min(timeout_s, DIRECT_S), check)
        except ConnectionRefusedError:
            raise  # its machine answers, and nobody else would get further
        except OSError:
            unheard.add(address)
    # One of each node: what one of them does not hear, none of its node does.
    by_host = {_host(one): one for one in relays if _host(one) != _host(address)}
    for relay in [*by_host.values()][:_ASKED]:
        # It may hear one of the two as little as they hear each other.
        with contextlib.suppress(OSError):
            return _through(relay, address, secret, timeout_s=timeout_s, check=check)
    unheard.discard(address)
    return connect(address, timeout_s, check)


def _through(
    relay: str, address: str, secret: Secret, *, timeout_s: float, check: Check | None
) -> socket.socket:
    sock = connect(relay, min(timeout_s, DIRECT_S), check)
    try:
        prove(sock, secret, Kind.SERVER, timeout_s=timeout_s, check=check)
        send_frame(sock, {"t": RELAY, "to": address})
        answer = receive_frame(sock, timeout_s, check)
        if "error" in answer:
            raise ConnectionError(f"{relay} does not reach {address}: {answer['error']}")
    except BaseException:
        sock.close()
        raise
    return sock


def carry(known: Callable[[], Collection[str]], request: Frame, sock: socket.socket) -> None:
    """Carry bytes between `sock` and the agent that is asked for, until both have ended.

    ``known()``: the addresses of the job's agents; to no others is anything carried.
    """
    with sock:
        address = str(request["to"])
        if address not in known():
            send_frame(sock, {"t": RELAY, "error": f"{address} is no member's address"})
            return
        try:
            far = connect(address, DIRECT_S)
        except OSError as error:
            send_frame(sock, {"t": RELAY, "error": str(error)})
            return
        with far:
            probe_when_silent(far)
            send_frame(sock, {"t": RELAY})
            back = threading.Thread(target=_pass_on, args=(far, sock), name="relay", daemon=True)
            back.start()
            _pass_on(sock, far)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on in one direction until it ends; where it breaks, both directions do."""
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        source.settimeout(None)
        while count := source.recv_into(chunk):
            target.sendall(chunk[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):  # it has ended already
                end.shutdown(socket.SHUT_RDWR)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
