"""The test faults: how a process dies or hangs when the script of faults says so."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

_LOOK_S = 0.001


def strike(how: str) -> NoReturn:
    """Die ("kill"), or hang: "loop" in Python, "gil" in C with the interpreter's lock, "stop"."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "gil":
            # PyDLL keeps the lock during the call.
            ctypes.PyDLL(None).sleep(3600)


@contextlib.contextmanager
def once_written(folder: Path, fire: Callable[[], None]) -> Iterator[None]:
    """Call ``fire()`` from a thread as soon as a file of the folder has a byte, in this block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if bytes_in(folder):
                return fire()

    thread = threading.Thread(target=watch, name="elaswave-fault", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bytes_in(folder: Path) -> int:
    """Count the bytes of the files of a folder, which others may write and remove meanwhile."""
    written = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                written += 0 if path.is_dir() else path.stat().st_size
    return written
