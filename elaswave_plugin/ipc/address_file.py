"""The address at which a supervisor of a running job answers: a file in the run directory.

Its owner alone may read it, and it is gone when the job is (standard library only).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from elaswave_plugin.ipc.secret import secret_in

_NAME = "supervisor-{slot}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The supervisor of `slot` is process `pid` of `node` and answers at `address`, host:port."""

    def __str__(self) -> str:
        return self.address

    slot: int
    node: int
    pid: int
    address: str


@contextlib.contextmanager
def published(
    run_dir: str | None, address: Address, lost: Callable[[], Iterable[tuple[int, int]]]
) -> Iterator[None]:
    """Has the file there while the block runs; also removes what those of `lost()` left.

    They are (slot, process id). The file of another process in a slot is its own, and stays.
    Where it cannot be written, a line says so: the launch has tried it, so the directory has gone
    bad since, and the job goes on.
    """
    if run_dir is None:
        yield
        return
    try:
        _write(run_dir, address)
    except OSError as error:
        text = f"worker {address.slot} is not found by way of {run_dir}: {error.strerror}"
        print(f"elaswave: {text}", file=sys.stderr)
    try:
        yield
    finally:
        for slot, pid in ((address.slot, address.pid), *lost()):
            path = _path(run_dir, slot)
            # What became of a job does not hang on a file system that answers no more.
            with contextlib.suppress(OSError):
                if (found := _read(path)) is not None and found.pid == pid:
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not read_addresses(run_dir):  # the last one of the job
                secret_in(run_dir).unlink(missing_ok=True)


def clear_addresses(run_dir: str | None) -> None:
    """Remove what an earlier job, all of it killed, has left."""
    for path in [] if run_dir is None else Path(run_dir).glob(_NAME.format(slot="*")):
        path.unlink(missing_ok=True)


def _write(run_dir: str, address: Address) -> None:
    """The whole file at once, or none."""
    path = _path(run_dir, address.slot)
    draft = path.with_suffix(f".{address.pid}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(asdict(address), file)
    draft.rename(path)


def read_addresses(run_dir: str | os.PathLike[str]) -> list[Address]:
    """All addresses in the directory, by slot; raises OSError where one may not be read."""
    found = map(_read, Path(run_dir).glob(_NAME.format(slot="*")))
    return sorted((one for one in found if one is not None), key=lambda one: one.slot)


def _read(path: Path) -> Address | None:
    """None where it is gone by now, or is no address: losing power tears files."""
    try:
        return Address(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _path(run_dir: str, slot: int) -> Path:
    return Path(run_dir) / _NAME.format(slot=slot)
