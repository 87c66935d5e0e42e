"""The secret of a job, which each process of it holds, and the file in which it may lie."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError

SECRET_FILE = "ELASWAVE_SECRET_FILE"
_IN_RUN_DIR = "secret"
_BYTES = 32
# A word that a person thinks of can be found by trying; `elaswave secret new` draws 64 digits.
_FEWEST_CHARACTERS, _MOST_BYTES = 32, 4096


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of the handshakes of one job (`handshake.py`); not shown when printed."""

    value: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
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
