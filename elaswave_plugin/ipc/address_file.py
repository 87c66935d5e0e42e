"""The address at which an agent of a running job answers: a file in the run directory.

Its owner alone may read it, and it is gone when the job is (standard library only).
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from elaswave_plugin.ipc.secret import secret_in

_NAME = "agent-{node}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The agent of `node` is process `pid` and answers at `address`, host:port."""

    def __str__(self) -> str:
        return self.address

    node: int
    pid: int
    address: str


@contextlib.contextmanager
def published(
    run_dir: str | None, address: Address, has_left: Callable[[int], bool]
) -> Iterator[None]:
    """Has the file there while the block runs; also removes those of nodes that have left.

    The file of another process of the own node is that one's, and stays. Where it cannot be
    written, a line says so: the launch has tried it, so the directory has gone bad since, and the
    job goes on.
    """
    if run_dir is None:
        yield
        return
    try:
        _write(run_dir, address)
    except OSError as error:
        text = f"node {address.node} is not found by way of {run_dir}: {error.strerror}"
        print(f"elaswave: {text}", file=sys.stderr)
    try:
        yield
    finally:
        # What became of a job does not hang on a file system that answers no more.
        with contextlib.suppress(OSError):
            for found in read_addresses(run_dir):
                is_own = found.node == address.node and found.pid == address.pid
                if is_own or (found.node != address.node and has_left(found.node)):
                    _path(run_dir, found.node).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not read_addresses(run_dir):  # the last one of the job
                secret_in(run_dir).unlink(missing_ok=True)


def clear_addresses(run_dir: str | None) -> None:
    """Remove what an earlier job, all of it killed, has left."""
    for path in [] if run_dir is None else Path(run_dir).glob(_NAME.format(node="*")):
        path.unlink(missing_ok=True)


def _write(run_dir: str, address: Address) -> None:
    """The whole file at once, or none."""
    path = _path(run_dir, address.node)
    draft = path.with_suffix(f".{address.pid}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(asdict(address), file)
    draft.rename(path)


def read_addresses(run_dir: str | os.PathLike[str]) -> list[Address]:
    """All addresses in the directory, by node; raises OSError where one may not be read."""
    found = map(_read, Path(run_dir).glob(_NAME.format(node="*")))
    return sorted((one for one in found if one is not None), key=lambda one: one.node)


def _read(path: Path) -> Address | None:
    """None where it is gone by now, or is no address: losing power tears files."""
    try:
        return Address(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _path(run_dir: str, node: int) -> Path:
    return Path(run_dir) / _NAME.format(node=node)
