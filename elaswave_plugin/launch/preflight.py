"""The checks before a job starts: its run directory is its own, and files enough may be open."""

from __future__ import annotations

import contextlib
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import Address, read_addresses
from elaswave_plugin.ipc.handshake import secret_at
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Secret, named_secrets
from elaswave_plugin.tracking.events import EVENTS_FILE, LEDGER_FILE, STEPS_FILE

# As many as the smallest file takes on a disk.
_TRIAL_BYTES = 4096
ANSWER_S = 2.0
MOST_AT_ONCE = 64


OWN_DESCRIPTORS = 256
"""The most that a worker has open beside one connection with each of the others."""


class SecondJobError(ConfigurationError):
    """Another job uses the run directory."""


def check_run_dir(folder: Path | None) -> None:
    """Raise ConfigurationError where no run directory can be made there; None is none."""
    if folder is None:
        return
    found = next(str(path) for path in (folder, *folder.parents) if os.path.exists(path))
    # A folder in which nobody may search looks like an empty one.
    if not os.path.isdir(found) or not os.access(found, os.W_OK | os.X_OK):
        what = "cannot be written" if os.path.isdir(found) else "is a file"
        raise ConfigurationError(
            f"the run directory is {str(folder)!r}, and {found!r} {what}; name a folder of yours"
            " (--elaswave-dir)"
        )


def open_run_dir(folder: Path | None) -> None:
    """Make a run directory and try all that a job does there; raises ConfigurationError.

    A new one is its user's alone; one that is there keeps the mode that it was given.
    """
    if folder is None:
        return
    trial = folder / f"trial-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (EVENTS_FILE, STEPS_FILE, LEDGER_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(folder / name, os.O_WRONLY | os.O_APPEND))
        read_addresses(folder)
        try:
            trial.write_bytes(bytes(_TRIAL_BYTES))
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory is {str(folder)!r}, and {str(error.filename or folder)!r} cannot be"
            f" written ({error.strerror}); name a folder of yours (--elaswave-dir)"
        ) from None


def refuse_second_job(folder: Path | None) -> None:
    """Raise ConfigurationError where an agent of another job answers; None is none.

    For the first node of a job, before the others can have written their addresses.
    """
    known = [] if folder is None else read_addresses(folder)
    with ThreadPoolExecutor(max(1, min(MOST_AT_ONCE, len(known)))) as pool:
        ask = partial(_answers, secrets=named_secrets(os.environ, folder))
        for one, answers in zip(known, pool.map(ask, known), strict=True):
            if answers:
                raise SecondJobError(
                    f"a job is running in {str(folder)!r}: its agent of node {one.node} (pid"
                    f" {one.pid}) answers at {one}; give each job a run directory of its own"
                    " (--elaswave-dir)"
                )


def _answers(one: Address, *, secrets: list[Secret]) -> bool:
    try:
        secret = secret_at(one.address, secrets, ANSWER_S)
        answer = request(one.address, {"t": "status"}, ANSWER_S, secret)
    except OSError:
        return False
    # The port may belong to somebody else by now.
    return answer.get("pid") == one.pid


def allow_descriptors(workers: int) -> None:
    """Raise the limit of this process and its children by what a job of this many workers needs.

    Raises ConfigurationError where the hard limit is too low for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers + OWN_DESCRIPTORS
    most = soft + needed if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise ConfigurationError(
            f"the limit of open files is {most} (`ulimit -Hn`), wanted at least {needed}: each of "
            f"{workers} workers has a connection with each other one; raise it on every node"
        )
    # Not to the hard limit, which may be a billion: some programs go through all numbers below it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft + needed), hard))
