"""The test faults: how a process dies or hangs when the script of faults says so."""

import ctypes
import os
import signal
from typing import NoReturn


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
