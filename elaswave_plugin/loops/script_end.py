"""Leaves the job at the end of a script, unless an exception ends it."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from elaswave_plugin.ipc.process_tree import exit_at_once


def leave_at_exit(leave: Callable[[], None], *, abandon: Callable[[], None]) -> None:
    """Have ``leave()`` called when the script ends, ``abandon()`` where it raises."""
    show, pid = sys.excepthook, os.getpid()

    def failing(kind: Any, error: Any, trace: Any) -> None:
        abandon()
        show(kind, error, trace)

    def leave_once() -> None:
        if os.getpid() != pid:
            return  # the end of a child that was forked, as of a loader's
        try:
            leave()
        except SystemExit as end:
            # Among the functions of an exit it would be printed, and its code forgotten.
            exit_at_once(int(end.code or 0))

    sys.excepthook = failing
    # Not `atexit`: then no thread can be started any more, as the recovery from a loss does that
    # meets the workers here.
    threading._register_atexit(leave_once)  # type: ignore[attr-defined]
