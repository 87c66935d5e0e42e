"""The opening of every connection between processes of a job: each side proves the job's secret.

The dialling side sends its nonce; the accepting side answers with its own nonce and an HMAC-SHA256
over what both have said; the dialling side answers with another one. The keys of the two differ by
a label, so that no answer can be sent back. What follows on the connection is neither encrypted nor
signed.

The two sides are without sockets (`Dialling`, `Accepting`); `prove` and `admit` run them on a
blocking one. Standard library only.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum

from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret
from elaswave_plugin.ipc.wire import Check, receive_into

VERSION = 1
# So long may a stranger take to prove that it belongs to the job.
WITHIN_S = 5.0
ANY_NODE = -1
_MAGIC = b"EWav"
_NONCE_BYTES = _PROOF_BYTES = 32
# Magic, version, kind of connection, node of the dialling side.
_HEAD = struct.Struct("!4sBBi")
OPENING_BYTES = _HEAD.size + _NONCE_BYTES
ANSWER_BYTES = _HEAD.size + _NONCE_BYTES + _PROOF_BYTES
PROOF_BYTES = _PROOF_BYTES


class Kind(IntEnum):
    """The kinds of connections; a proof for one is none for another."""

    MEETING = 1
    PEER = 2
    SERVER = 3
    LINK = 4
    # No proof: it asks for the secret, where the launcher's rendezvous is trusted with it.
    SECRET = 5
    MEMORY = 6
    NAME = 7


class HandshakeError(ElasWaveError, ConnectionError):
    """The other end has not proved that it belongs to this job."""


class Dialling:
    """The side that dials: `opening` is sent first, then what `answered` returns.

    Of several secrets it takes the one that the other side has; `secret` is that one then.
    """

    def __init__(self, secret: Secret, kind: Kind, node: int = ANY_NODE, *others: Secret) -> None:
        self.secret = secret
        self._secrets = (secret, *others)
        self._head = _HEAD.pack(_MAGIC, VERSION, kind, node)
        self.opening = self._head + os.urandom(_NONCE_BYTES)

    def answered(self, answer: bytes | memoryview) -> bytes:
        """Check the answer (ANSWER_BYTES), and return the proof; raises HandshakeError."""
        answer = bytes(answer)
        _check_head(answer, "the process that answers")
        said, proof = self.opening + answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        for secret in self._secrets:
            if hmac.compare_digest(proof, _proof(secret, b"accepts", said)):
                self.secret = secret
                return _proof(secret, b"dials", said + proof)
        raise HandshakeError(
            "the process that answers has another secret than this one: set"
            f" {SECRET_FILE} to the file that the job was started with, or name the job's run"
            " directory"
        )


class Accepting:
    """The side that is dialled; `node` is that of the dialling side, once it has said so."""

    def __init__(self, secret: Secret, kind: Kind) -> None:
        self._secret, self._kind = secret, kind
        self._wanted = b""
        self.node = ANY_NODE

    def opened(self, opening: bytes | memoryview) -> bytes:
        """Take the opening (OPENING_BYTES), and return the answer; raises HandshakeError.

        An opening of another version gets an answer that its sender can name.
        """
        opening = bytes(opening)
        head = _HEAD.pack(_MAGIC, VERSION, self._kind, ANY_NODE)
        version, kind, self.node = _check_magic(opening, "the process that dials")
        if kind != self._kind and version == VERSION:
            raise HandshakeError(f"the process that dials wants a connection of kind {kind}")
        said = opening + head + os.urandom(_NONCE_BYTES)
        answer = _proof(self._secret, b"accepts", said)
        self._wanted = _proof(self._secret, b"dials", said + answer)
        return said[OPENING_BYTES:] + answer

    def proved(self, proof: bytes | memoryview) -> None:
        """Check the proof (PROOF_BYTES); raises HandshakeError."""
        if not hmac.compare_digest(bytes(proof), self._wanted):
            raise HandshakeError("the process that dials does not have this job's secret")


def prove(
    sock: socket.socket,
    secret: Secret,
    kind: Kind,
    *,
    node: int = ANY_NODE,
    timeout_s: float = WITHIN_S,
    check: Check | None = None,
) -> None:
    """Dial's part on a blocking socket; raises HandshakeError, OSError, and what ``check`` does."""
    dialling = Dialling(secret, kind, node)
    sock.settimeout(timeout_s)
    sock.sendall(dialling.opening)
    sock.sendall(dialling.answered(_receive(sock, ANSWER_BYTES, timeout_s, check)))


def secret_at(address: str, secrets: Sequence[Secret], timeout_s: float) -> Secret:
    """Return which of these secrets the agent at "host:port" has; raises OSError."""
    host, _, port = address.rpartition(":")
    first, *others = secrets
    dialling = Dialling(first, Kind.SERVER, ANY_NODE, *others)
    with socket.create_connection((host, int(port)), timeout=timeout_s) as sock:
        sock.sendall(dialling.opening)
        sock.sendall(dialling.answered(_receive(sock, ANSWER_BYTES, timeout_s, None)))
    return dialling.secret


def admit(sock: socket.socket, secret: Secret, kind: Kind, *, timeout_s: float = WITHIN_S) -> int:
    """Accept's part on a blocking socket, all of it within ``timeout_s``; returns the node.

    Raises HandshakeError, OSError.
    """
    accepting, deadline_s = Accepting(secret, kind), time.monotonic() + timeout_s
    answer = accepting.opened(_receive(sock, OPENING_BYTES, timeout_s, None))
    sock.sendall(answer)
    accepting.proved(_receive(sock, PROOF_BYTES, deadline_s - time.monotonic(), None))
    return accepting.node


def asks_for_secret(opening: bytes) -> bool:
    """Return whether an opening is that of `Kind.SECRET`; raises HandshakeError."""
    version, kind, _ = _check_magic(opening, "the process that dials")
    return (version, kind) == (VERSION, Kind.SECRET)


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket is of this user, or root."""
    size = struct.calcsize("3i")
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", found)
    return uid in (0, os.geteuid())


def _proof(secret: Secret, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.value, side + b"\0" + said, "sha256")


def _check_magic(data: bytes, who: str) -> tuple[int, int, int]:
    magic, version, kind, node = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise HandshakeError(f"{who} is no process of an elaswave job (said {data[:12]!r})")
    return version, kind, node


def _check_head(data: bytes, who: str) -> None:
    version, _, _ = _check_magic(data, who)
    if version != VERSION:
        raise HandshakeError(
            f"{who} speaks version {version} of the handshake and this process {VERSION}: install"
            " the same elaswave_plugin on every node"
        )


def _receive(sock: socket.socket, count: int, timeout_s: float, check: Check | None) -> bytes:
    data = bytearray(count)
    receive_into(sock, memoryview(data), time.monotonic() + timeout_s, check)
    return bytes(data)
