"""A supervisor process: forked from the launcher, tied to its life, and nothing else of it.

The launcher has imported what a supervisor needs: importing it again takes a fifth of a second.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from elaswave_plugin.errors import EXIT_CONFIGURATION, ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.process_limit import explained_process_limit
from elaswave_plugin.ipc.process_tree import (
    die_with_parent,
    exit_at_once,
    lead_group,
    signal_group,
)
from elaswave_plugin.supervisor.standby import serve as serve_newcomer
from elaswave_plugin.supervisor.supervisor import Supervisor
from elaswave_plugin.supervisor.supervisor_spec import SupervisorSpec

EXIT_CRASHED = 70
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Descriptors(NamedTuple):
    """The descriptors that a supervisor inherits, -1 for those that it does not.

    They are the meeting's listener, the zygote, and the pipes to which its address and its
    trainers' process ids are written.
    """

    listener: int = -1
    zygote: int = -1
    address: int = -1
    trainers: int = -1


class SupervisorProcess:
    """A running supervisor, a child of this process, which must have no other thread."""

    def __init__(
        self, spec: SupervisorSpec, *, env: Mapping[str, str], descriptors: Descriptors
    ) -> None:
        """Start it with this environment; of our descriptors it keeps these, and 0 to 2."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else it would write the same once more
        parent_pid = os.getpid()
        self._trainers_fd, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal for it that comes at once must not ring our bell, which it inherits.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become(spec, env, descriptors._replace(trainers=theirs), parent_pid)
        finally:
            os.close(theirs)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._code: int | None = None
        self.rendezvous, self.joins = spec.rendezvous, bool(spec.joins)
        # What it has told of its trainers so far, the first of which runs once all have met.
        self._told: list[bytes] = []

    @property
    def has_met(self) -> bool:
        """True if it had met the others, or was let in, by the end that was waited for."""
        return bool(self._told)

    def wait(self) -> int:
        """Its exit code, -N where signal N ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._hear()
            if self._code < 0 or self._code == EXIT_CRASHED:
                self._end_trainer()
            os.close(self._trainers_fd)
        return self._code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it was waited for: its number may be another's by now."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it without a word to it."""
        self.send_signal(signal.SIGKILL)
        if self._code is None:
            self._end_trainer()

    def _end_trainer(self) -> None:
        """End the process group of the last trainer, as the supervisor cannot do any more.

        What a trainer has started outlives it.
        """
        self._hear()
        if self._told and int(self._told[-1]):
            signal_group(int(self._told[-1]), signal.SIGKILL)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._trainers_fd, 1 << 16).split()


def _become(
    spec: SupervisorSpec, env: Mapping[str, str], descriptors: Descriptors, parent_pid: int
) -> NoReturn:
    """Be the supervisor to the end of this process: nothing of the launcher's runs or is freed."""
    code = EXIT_CRASHED
    try:
        die_with_parent(parent_pid)
        lead_group()
        # Whatever is garbage by now would close descriptors whose numbers are given away below.
        gc.freeze()
        _close_all_but(descriptors)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.environ.clear()
        os.environ.update(env)
        with explained_process_limit():
            code = _supervise(replace(spec, env=dict(env)), descriptors)
    except SystemExit as end:  # a signal, before there was a job
        code = end.code if isinstance(end.code, int) else EXIT_CRASHED
    except ConfigurationError as error:
        say(f"worker {spec.rendezvous.slot}: {error}")
        code = EXIT_CONFIGURATION
    except BaseException:
        traceback.print_exc()
    finally:
        exit_at_once(code)


def _supervise(spec: SupervisorSpec, descriptors: Descriptors) -> int:
    zygote = _inherited(descriptors.zygote)

    def tell(address: str) -> None:
        if descriptors.address >= 0:
            os.write(descriptors.address, f"{address}\n".encode())
            os.close(descriptors.address)

    def tell_trainer(pid: int) -> None:
        os.write(descriptors.trainers, f"{pid}\n".encode())

    if spec.joins:
        return serve_newcomer(spec, zygote, on_trainer=tell_trainer)
    supervisor = Supervisor(spec, listener=_inherited(descriptors.listener), zygote=zygote)
    return supervisor.run(on_met=tell, on_trainer=tell_trainer)


def _inherited(fd: int) -> socket.socket | None:
    return None if fd < 0 else socket.socket(fileno=fd)


def _close_all_but(kept: Descriptors) -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            # One of them is the descriptor of the listing itself, closed by now.
            with contextlib.suppress(OSError):
                os.close(fd)
