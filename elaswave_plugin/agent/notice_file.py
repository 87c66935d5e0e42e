"""A file from the scheduler: once it exists, the workers of this node leave the job."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.reactor import Reactor

NOTICE_FILE = "ELASWAVE_NOTICE_FILE"
_LOOK_EVERY_S = 0.25
_MOST_BYTES = 200


def check_notice_file(path: str | os.PathLike[str]) -> None:
    """Raise ConfigurationError where the file is there already, or could never be put there."""
    if os.path.lexists(path):
        raise ConfigurationError(
            f"the notice file {os.fspath(path)!r} exists, which tells the workers of this node to "
            "leave: remove it before the job starts"
        )
    if not Path(path).absolute().parent.is_dir():
        raise ConfigurationError(
            f"the notice file is to be {os.fspath(path)!r}, whose folder does not exist: create it"
        )


def watch_notice_file(reactor: Reactor, path: str, on_notice: Callable[[str], None]) -> None:
    """Call `on_notice(reason)` once, when the file is there; its first line is the reason.

    Looked for every quarter of a second: a file on a network has no events to wait for. In a thread
    of its own, since such a network may keep the thread that looks waiting.
    """

    def look() -> None:
        while (line := _first_line(path)) is None:
            time.sleep(_LOOK_EVERY_S)
        said = f"the notice file {path}" + (f": {line}" if line else " is there")
        reactor.post(partial(on_notice, said))

    threading.Thread(target=look, name="notice file", daemon=True).start()


def _first_line(path: str) -> str | None:
    """None without a file, and where it cannot be read: a network may be gone for a while."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES).partition("\n")[0].strip()
    except OSError:
        return None
