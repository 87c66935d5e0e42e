"""Connections whose other end answers nothing: the network between has stopped to carry packets.

A switch that drops packets says nothing, and what was sent is tried again for a quarter of an hour.
The kernel of a peer answers also where its process stands still, so that its silence is the
network's, or the machine's.
"""

import socket
import struct
from typing import NamedTuple

LIMIT_S = 3.0
DIAL_LIMIT_S = 2.0
LOOK_EVERY_S = 0.5
# An idle connection is asked so often, and is ours to give up.
_PROBE_EVERY_S, _KERNEL_LIMIT_S = 1, 900
# linux/tcp.h: what little is on its way is sent again each 0.2 s at first, not ever more seldom.
_THIN_LINEAR_TIMEOUTS = 16
# Of struct tcp_info (linux/tcp.h): segments on their way, milliseconds since the last answer, those
# that were sent again, and bytes that wait for room at the other end.
_INFO = struct.Struct("=24xI28xI40xI40xI")


def have_probed(sock: socket.socket) -> None:
    """Have the kernel ask an idle peer every second whether it is there, and not give up soon.

    Where packets are lost, a beat that is sent again ever more seldom would be a silence.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return  # both ends are of this machine
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    # In place of a number of probes, of which the kernel allows 127.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _KERNEL_LIMIT_S)


class Answers(NamedTuple):
    """The answers of another machine: seconds since the last, and packets that were sent again."""

    silent_s: float
    sent_again: int


def answers(sock: socket.socket) -> Answers:
    """Return how the other machine answers on an open connection.

    Where the peer has no room it is asked ever more seldom, and is not silent.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return Answers(0.0, 0)  # a kernel before 4.6 does not tell
    unacked, since_ms, sent_again, waiting = _INFO.unpack(info)
    return Answers(0.0 if waiting and not unacked else since_ms / 1000, sent_again)
