"""The secret of a job: the file in which it may lie, and the proof that opens every connection.

The dialling side sends its nonce; the accepting side answers with its own nonce and an HMAC-SHA256
over what both have said; the dialling side answers with another one. The keys of the two differ by
a label, so that no answer can be sent back. What follows on the connection is neither encrypted nor
signed.

The two sides are without sockets (`Dialling`, `Accepting`); `prove` and `admit` run them on a
blocking one. Standard library only.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.wire import Check, receive_into

SECRET_FILE = "ELASWAVE_SECRET_FILE"
_IN_RUN_DIR = "secret"
_BYTES = 32
# A word that a person thinks of can be found by trying; `elaswave secret new` draws 64 digits.
_FEWEST_CHARACTERS, _MOST_BYTES = 32, 4096


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of the handshakes of one job; not shown when printed."""

    value: bytes = field(repr=False)

    @classmethod
    def new(cls) -> "Secret":
        """Draw one."""
        return cls(secrets.token_hex(_BYTES).encode())

    @property
    def fingerprint(self) -> str:
        """Say which secret it is, without giving it away."""
        return hashlib.sha256(b"elaswave fingerprint\0" + self.value).hexdigest()[:16]


def read_secret(path: str | os.PathLike[str]) -> Secret:
    """Read a secret file; raises ConfigurationError where it is missing, too short or too open.

    Its owner is this user or root. A group may read it, as Kubernetes needs; others may not.
    """
    name = f"the secret file {os.fspath(path)!r}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read ({error.strerror}); {_MAKE}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise ConfigurationError(f"{name} is no regular file; {_MAKE}")
    with open(fd, "rb") as file:
        if found.st_mode & 0o027:
            raise ConfigurationError(
                f"{name} has mode {stat.S_IMODE(found.st_mode):04o}, wanted at most 0640, so that"
                f" others can neither read nor change it: chmod 600 {os.fspath(path)}"
            )
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigurationError(f"{name} belongs to user {found.st_uid}; {_MAKE}")
        value = file.read(_MOST_BYTES + 1).strip()
    if not _FEWEST_CHARACTERS <= len(value) <= _MOST_BYTES:
        raise ConfigurationError(
            f"{name} has {len(value)} characters, wanted {_FEWEST_CHARACTERS} to {_MOST_BYTES};"
            f" {_MAKE}"
        )
    return Secret(value)


_MAKE = "make one with `elaswave secret new FILE`"


def write_secret(path: str | os.PathLike[str], secret: Secret, *, replace: bool = False) -> None:
    """Write a 0600 file, whole; raises OSError, also where it exists, unless ``replace``."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(secret.value + b"\n")
        if replace:
            draft.rename(target)
        else:
            os.link(draft, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def secret_in(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path of the secret in a run directory."""
    return Path(run_dir) / _IN_RUN_DIR


def named_secret(env: Mapping[str, str]) -> Secret | None:
    """Read the secret that ELASWAVE_SECRET_FILE names; None without it.

    Raises ConfigurationError as `read_secret` does.
    """
    path = env.get(SECRET_FILE)
    return read_secret(path) if path else None


def named_secrets(env: Mapping[str, str], run_dir: str | os.PathLike[str] | None) -> list[Secret]:
    """Return the secrets that a job may have, for a process that comes to it from outside.

    That of ELASWAVE_SECRET_FILE; else that in the run directory; else those of this user's jobs on
    this machine; else one that no job has. Raises ConfigurationError for a file that is no secret.
    """
    secret = named_secret(env)
    if secret is not None:
        return [secret]
    if run_dir is not None and secret_in(run_dir).exists():
        return [read_secret(secret_in(run_dir))]
    return list(dict.fromkeys(secrets_of_user())) or [Secret.new()]


def user_folder() -> Path:
    """Return the folder in which the jobs of this user leave their secrets, on this machine."""
    return Path(f"/tmp/elaswave-{os.geteuid()}")


def secrets_of_user() -> Iterator[Secret]:
    """Yield those that can be read."""
    for path in _left_secrets():
        with contextlib.suppress(ConfigurationError):
            yield read_secret(path)


@contextlib.contextmanager
def left_to_user(secret: Secret) -> Iterator[None]:
    """Leave a secret where commands of this user on this machine find it, while the block runs.

    Where the folder is another user's, it is not left: the commands say what they want then.
    """
    _remove_unheld()
    own = user_folder() / f"{os.getpid()}-{secret.fingerprint}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            fd = _write_held(own, secret)
            if fd is not None:
                held.callback(os.close, fd)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
                user_folder().rmdir()  # where no other job has left one


def _write_held(path: Path, secret: Secret) -> int | None:
    """Write a secret under a lock, which lasts as long as the returned descriptor is open.

    None where the folder is another user's.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        # Another launcher may remove the folder as it ends, or the file before it is locked.
        with contextlib.suppress(FileNotFoundError):
            if not _is_private(path.parent):
                return None
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                os.write(fd, secret.value + b"\n")
                return fd
            os.close(fd)


def _remove_unheld() -> None:
    """Remove what killed launchers have left.

    A process id would not tell: where containers share the folder, each has numbers of its own.
    """
    for path in _left_secrets():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file.fileno(), path):
                path.unlink()


def _is_at(fd: int, path: Path) -> bool:
    """Return whether a path is that of an open file, and not of one that was made there since."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _left_secrets() -> list[Path]:
    try:
        return sorted(user_folder().iterdir()) if _is_private(user_folder()) else []
    except OSError:
        return []


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


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


MOST = 64


class Strangers:
    """The connections to one listener that have not proved themselves: few, and not for long.

    Where all places are taken, the oldest is sent away, so that silent ones keep no member
    of the job out. Any thread may call it.
    """

    def __init__(self, address: str, *, most: int = MOST, within_s: float = WITHIN_S) -> None:
        self._address, self._most, self._within_s = address, most, within_s
        self._lock = threading.Lock()
        self._came_s: dict[socket.socket, float] = {}
        # How many connections were closed since they did not prove, or did not speak, as they must.
        self.refused = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._came_s)

    @contextlib.contextmanager
    def one(self, sock: socket.socket) -> Iterator[None]:
        """Count a connection as a stranger while the block runs."""
        self.came(sock)
        try:
            yield
        finally:
            self.is_known(sock)

    def came(self, sock: socket.socket) -> None:
        """Count a new connection, and end the oldest stranger where there are too many."""
        with self._lock:
            oldest = next(iter(self._came_s), None) if len(self._came_s) >= self._most else None
            if oldest is not None:
                del self._came_s[oldest]
            self._came_s[sock] = time.monotonic()
        if oldest is not None:
            _end(oldest)

    def is_known(self, sock: socket.socket) -> None:
        """Count it no more: it has proved, or is closed."""
        with self._lock:
            self._came_s.pop(sock, None)

    def end_late(self) -> None:
        """End those that have taken longer than they may."""
        now_s = time.monotonic()
        with self._lock:
            late = [one for one, at_s in self._came_s.items() if now_s - at_s > self._within_s]
            for one in late:
                del self._came_s[one]
        for one in late:
            _end(one)

    def next_end_s(self) -> float | None:
        """Return the seconds until the next one is late; None where there is none."""
        with self._lock:
            first_s = next(iter(self._came_s.values()), None)
        return None if first_s is None else max(0.0, first_s + self._within_s - time.monotonic())

    def refuse(self, why: object) -> None:
        """Count a connection that was closed for what came; the first one is said."""
        with self._lock:
            self.refused += 1
            first = self.refused == 1
        if first:
            say(f"a connection to {self._address} was closed, others like it are counted: {why}")


def _end(sock: socket.socket) -> None:
    # Its owner notices, and closes it: a descriptor that is closed here could be another's by then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
