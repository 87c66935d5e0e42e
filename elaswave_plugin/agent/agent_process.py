"""An agent's process: forked from its guardian, tied to its life, and nothing else of it.

The guardian has imported what an agent needs: importing it again takes a fifth of a second.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from elaswave_plugin.agent.agent import Agent, ended_early
from elaswave_plugin.agent.common import AgentSpec
from elaswave_plugin.agent.guardian import EXIT_CRASHED
from elaswave_plugin.agent.keeper import Keeper
from elaswave_plugin.errors import EXIT_CONFIGURATION, ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.process_tree import (
    SIGNALS_TO_END,
    close_all_but,
    die_with_parent,
    exit_at_once,
    explained_process_limit,
    lead_group,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """The way to begin an agent; `listener`: where others come to, on the first node of a launch.

    `data`: the listening sockets of its server, which its next lives have too; `env`: its own.
    """

    spec: AgentSpec
    env: Mapping[str, str]
    data: tuple[socket.socket, socket.socket]
    listener: socket.socket | None = None

    def begin(self, calls: socket.socket, notices: socket.socket, life: int) -> int:
        """Fork one, the guardian's child; returns its process id. The guardian has one thread."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else it would write the same once more
        parent_pid = os.getpid()
        # A signal for it that comes at once must not ring our bell, which it inherits.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_TO_END)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(calls, notices, life, parent_pid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_END)
        return pid

    def _become(
        self, calls: socket.socket, notices: socket.socket, life: int, parent_pid: int
    ) -> NoReturn:
        """Be the agent to the end of this process: nothing of the guardian's runs or is freed."""
        code = EXIT_CRASHED
        try:
            die_with_parent(parent_pid)
            lead_group()
            # Whatever is garbage by now would close descriptors whose numbers are given away below.
            gc.freeze()
            listener = self.listener if life == 0 else None
            kept = [calls, notices, *self.data, *([] if listener is None else [listener])]
            close_all_but({sock.fileno() for sock in kept})
            # Who signals all processes of a job means the guardian, which hands it on.
            for number in SIGNALS_TO_END:
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, ended_early)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_END)
            os.environ.clear()
            os.environ.update(self.env)
            with explained_process_limit():
                keeper = Keeper(calls, notices)
                code = Agent(self.spec, keeper, life=life, listener=listener, data=self.data).run()
        except SystemExit as end:  # a signal, before there was a job
            code = end.code if isinstance(end.code, int) else EXIT_CRASHED
        except ConfigurationError as error:
            say(f"node {self.spec.rendezvous.node}: {error}")
            code = EXIT_CONFIGURATION
        except BaseException:
            traceback.print_exc()
        finally:
            exit_at_once(code)
