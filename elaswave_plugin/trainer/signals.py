"""Signals that reach all processes of a job end no trainer that works (standard library only).

A scheduler or systemd may send them to each process of a control group. The guardian hears them
too, and its agent has the trainers leave between two steps; one that died of it could not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection
from types import FrameType

from elaswave_plugin.ipc.progress_page import ProgressPage

SHARED = (signal.SIGTERM, signal.SIGUSR1)


def outlive_shared_signals(page: ProgressPage, *, anyway: Collection[int] = ()) -> None:
    """Have these signals end this process only where its agent wants so, by the page.

    This does nothing in other threads than the main one, or for signals that the script handles
    itself, now or later; those of `anyway` it takes over now. The signals are not ignored
    (SIG_IGN): what the trainer starts would inherit that over exec as well, and multiprocessing
    ends its children by SIGTERM. The children are as without this.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    found = {number: signal.getsignal(number) for number in SHARED}
    numbers = [one for one, now in found.items() if now is signal.SIG_DFL or one in anyway]

    def heard(number: int, frame: FrameType | None) -> None:
        if page.is_told_to_end:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    masks = threading.local()

    def before_fork() -> None:
        # One that comes for the child before it is as without this would be lost.
        masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.old)

    def in_child() -> None:
        for number in numbers:
            if signal.getsignal(number) is heard:
                signal.signal(number, signal.SIG_DFL)
        after_fork()

    for number in numbers:
        signal.signal(number, heard)
        signal.siginterrupt(number, False)  # system calls go on as without a handler
    os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=in_child)
