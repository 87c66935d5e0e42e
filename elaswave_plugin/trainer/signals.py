"""Signals that reach all processes of a job, and stops, end no trainer that works (stdlib only).

A scheduler or systemd may send them to each process of a control group. The guardian hears them
too, and its agent has the trainers leave between two steps; one that died of it could not.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.progress_page import ProgressPage

_LOOK_EVERY_S = 0.01
# The others have long given up a node whose agent is silent for that long.
_SILENT_LIMIT_S = 600.0


def await_lease(page: ProgressPage, check: Callable[[], None] = lambda: None) -> None:
    """Wait until the trainer of this page may act; ``check()`` raises where it never will.

    A worker that stands still for longer than an agent may be silent may be given up meanwhile. Its
    page says until when it may act (`core/agreement/lease.py`), and its agent lends it more time
    only while the others hear that agent. A job that is stopped as a whole, as a scheduler may do,
    so goes on as it was.

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


SHARED = (signal.SIGTERM, signal.SIGUSR1)
Action = Callable[[int, FrameType | None], Any]


class SharedSignals:
    """This process's handlers of these signals: ours, and what the script has for SIGTERM.

    A signal comes to each worker at another moment. So a handler of the script's for SIGTERM is
    not called then, but by `call`, where all workers are at the same step.
    """

    def __init__(self, page: ProgressPage) -> None:
        """The agent says by ``page`` that a signal has to end this process."""
        self._page = page
        self._masks = threading.local()
        self._is_at_forks = False
        self.of_script: Action | None = None

    def take(self) -> None:
        """Put ours in the place of the defaults, and of a handler of SIGTERM that the script has.

        This does nothing in other threads than the main one, nor for a signal that the script
        ignores, or SIGUSR1 where it handles that. Ours do not ignore them (SIG_IGN): what the
        trainer starts would inherit that over exec as well, and multiprocessing ends its children
        by SIGTERM. The children are as without this.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        found = signal.getsignal(signal.SIGTERM)
        new = found if callable(found) and not self.is_ours(found) else None
        numbers = [one for one in SHARED if signal.getsignal(one) is signal.SIG_DFL]
        numbers += [signal.SIGTERM] if new else []
        for number in numbers:
            self._install(number)
        if numbers and not self._is_at_forks:
            self._is_at_forks = True
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork,
                after_in_child=self._in_child,
            )
        self.of_script = new or self.of_script

    def is_ours(self, action: object) -> bool:
        """Return whether a handler is the one that `take` puts there."""
        return action == self._heard

    def take_over(self, number: int) -> None:
        """Forget what handles a signal so far: an adapter does in its place what it is for."""
        self.take()
        if number in SHARED and threading.current_thread() is threading.main_thread():
            self._install(number)
            self.of_script = None if number == signal.SIGTERM else self.of_script

    def call(self) -> None:
        """Call what the script has for SIGTERM, as if that came now; it may raise anything."""
        if self.of_script is not None:
            self.of_script(signal.SIGTERM, sys._getframe())

    def _install(self, number: int) -> None:
        signal.signal(number, self._heard)
        signal.siginterrupt(number, False)  # system calls go on as without a handler

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self._page.is_told_to_end:
            return
        # It may call the one before it, which is this one.
        own, self.of_script = self.of_script, None
        if number == signal.SIGTERM and own is not None:
            own(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _before_fork(self) -> None:
        # One that comes for the child before it is as without this would be lost.
        self._masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SHARED)

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.old)

    def _in_child(self) -> None:
        for number in SHARED:
            if self.is_ours(signal.getsignal(number)):
                own = self.of_script if number == signal.SIGTERM else None
                signal.signal(number, own or signal.SIG_DFL)
        self._after_fork()
