"""A worker that was stopped does nothing for the job before the others are sure to count it in.

A worker that stands still for longer than an agent may be silent may be given up meanwhile. Its
page says until when it may act (`core/agreement/lease.py`), and its agent lends it more time only
while the others hear that agent. A job that is stopped as a whole, as a scheduler may do, so goes
on as it was.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.progress_page import ProgressPage

_LOOK_EVERY_S = 0.01
# The others have long given up a node whose agent is silent for that long.
_SILENT_LIMIT_S = 600.0


def await_lease(page: ProgressPage, check: Callable[[], None] = lambda: None) -> None:
    """Wait until the trainer of this page may act; ``check()`` raises where it never will.

    Raises JobStopped where its agent stays silent: the guardian is stopped or stuck as well, or it
    would have begun another agent.
    """
    waited_s = 0.0  # by its own waits: while the job is suspended, none of it passes
    heard_ns = page.agent_ns
    while not page.may_act:
        check()
        if page.agent_ns != heard_ns:  # it lives, and has nothing to lend
            heard_ns, waited_s = page.agent_ns, 0.0
        if waited_s > _SILENT_LIMIT_S:
            raise JobStopped(
                f"the agent of this worker has been silent for {waited_s:.0f} s, stopped or "
                "stuck: the others have gone on without this node; end what is left of it here"
            )
        time.sleep(_LOOK_EVERY_S)  # memory that another process writes has no event
        waited_s += _LOOK_EVERY_S


def guard_continuing(page: ProgressPage, stopped: Callable[[], JobStopped | None]) -> None:
    """Have the main thread begin with that when it is continued (SIGCONT).

    ``stopped()``: what is raised there instead once the job is over for this worker. Nothing in
    other threads, and where the script handles SIGCONT itself.
    """

    def check() -> None:
        error = stopped()
        if error is not None:
            raise error

    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, lambda number, frame: await_lease(page, check))
        signal.siginterrupt(signal.SIGCONT, False)  # system calls go on as without a handler
