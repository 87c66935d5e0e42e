"""Lines on stderr for the person who watches a job (standard library only)."""

import contextlib
import select
import sys
from typing import TextIO


def say(text: str) -> None:
    """Write lines for the watcher of a job; lost if they are not read now.

    A full pipe would hold up the control loop, and a worker whose beats stop is lost.
    """
    with contextlib.suppress(OSError):
        for line in f"elaswave: {text}".splitlines():
            if _takes_more(sys.stderr):
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def _takes_more(stream: TextIO) -> bool:
    """Return whether a line can be written without waiting for a reader."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):
        return True  # no file at all
