"""Connections whose other end answers nothing: the network between has stopped to carry packets.

A switch that drops packets says nothing, and what was sent is tried again for a quarter of an hour.
The kernel of a peer answers also where its process stands still, so that its silence is the
network's, or the machine's.
"""

from __future__ import annotations

import socket
import struct

LIMIT_S = 3.0
DIAL_LIMIT_S = 2.0
LOOK_EVERY_S = 0.5
# An idle connection is asked so often, and is ours to give up.
_PROBE_EVERY_S, _KERNEL_LIMIT_S = 1, 900
# Of struct tcp_info (linux/tcp.h): segments on their way, milliseconds since the last answer, and
# bytes that wait for room at the other end.
_INFO = struct.Struct("=24xI28xI84xI")


def have_probed(sock: socket.socket) -> None:
    """Have the kernel ask an idle peer every second whether it is there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    # In place of a number of probes, of which the kernel allows 127.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _KERNEL_LIMIT_S)


def silent_s(sock: socket.socket) -> float:
    """Return the seconds for which the other machine has left an open connection unanswered.

    0 where the peer has no room, which it is asked for ever more seldom.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return 0.0  # a kernel before 4.6 does not tell
    unacked, since_ms, waiting = _INFO.unpack(info)
    return 0.0 if waiting and not unacked else since_ms / 1000
