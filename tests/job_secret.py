"""The secret of the jobs that tests make up, piece by piece."""

import socket

from elaswave_plugin.ipc.secret import Kind, Secret, admit, prove

SECRET = Secret(b"7" * 64)


def dialled(address: str, kind: Kind, timeout_s: float = 30.0) -> socket.socket:
    """Connect to "host:port", and prove the secret."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    prove(sock, SECRET, kind)
    sock.settimeout(timeout_s)
    return sock


def accepted(listener: socket.socket, kind: Kind, timeout_s: float = 30.0) -> socket.socket:
    """Take the next connection, once it has proved the secret."""
    listener.settimeout(timeout_s)
    sock, _ = listener.accept()
    admit(sock, SECRET, kind)
    sock.settimeout(timeout_s)
    return sock
