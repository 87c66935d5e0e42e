"""A node's guardian in this process, from its first agent to the end of the job here."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from elaswave_plugin.agent.agent_process import AgentProcess
from elaswave_plugin.agent.agent_spec import AgentSpec
from elaswave_plugin.agent.guardian import EXIT_CRASHED, Guardian
from elaswave_plugin.agent.peers.rendezvous import tell_of_end
from elaswave_plugin.agent.snapshot_server import listen_for_data
from elaswave_plugin.agent.starters import Starter
from elaswave_plugin.errors import EXIT_FAILED, EXIT_LEFT_OUT
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.process_tree import SIGNALS_TO_END
from elaswave_plugin.ipc.reactor import Reactor


class GuardedNode:
    """Guards a node; `on_signal(number)` runs in the reactor, once there is a `guardian`.

    `env`: the agent's own; `listener`: where others come to, on the first node of a launch, which
    is closed here.
    """

    guardian: Guardian

    def __init__(
        self,
        spec: AgentSpec,
        env: Mapping[str, str],
        listener: socket.socket | None,
        *,
        on_signal: Callable[[int], None],
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._data = listen_for_data(spec.host)
        self._process = AgentProcess(spec=spec, env=env, data=self._data, listener=listener)
        self._on_signal = on_signal
        self._code = EXIT_FAILED
        self.has_met = False
        self.reactor = Reactor()
        # Those that were acted on.
        self.signals: list[int] = []

    def run(self, starters: Sequence[Starter | None]) -> int:
        """Serve until there is to be no agent any more; returns the exit code of the job here.

        `starters`: the ways to start trainers, by place; None: by exec.
        """
        self.guardian = Guardian(self.reactor, self._process.begin, starters, on_end=self._on_end)
        old = {number: signal.signal(number, self._post_signal) for number in SIGNALS_TO_END}
        try:
            self.guardian.start()
            if self._listener is not None:
                self._listener.close()
            self.reactor.run()
        finally:
            self.guardian.close()
            for number, action in old.items():
                signal.signal(number, action)
            for sock in self._data:
                sock.close()
            self.reactor.close()
        return self._exit_code()

    def _post_signal(self, number: int, frame: object) -> None:
        self.reactor.post(partial(self._on_signal, number))

    def _on_end(self, code: int) -> None:
        self._code, self.has_met = code, self.guardian.has_met
        self.reactor.stop()

    @property
    def is_left_out(self) -> bool:
        """True if the job has gone on without this node."""
        return self._code == EXIT_LEFT_OUT

    def _exit_code(self) -> int:
        """That of the job, as the agent that lived to its end tells it."""
        code, node = self._code, self._spec.rendezvous.node
        has_crashed = code < 0 or code == EXIT_CRASHED
        if code and not self.has_met and not self._spec.joins and not self.signals:
            # The others need not wait; one that has not crashed has said why.
            if has_crashed:
                say(f"the agent of node {node} ended before the job began")
            tell_of_end(self._spec.rendezvous, f"status {code}" if code > 0 else f"signal {-code}")
        if has_crashed and not self.signals:
            say(f"no agent of node {node} lived to the end of the job")
        return EXIT_FAILED if has_crashed or code == EXIT_LEFT_OUT else code
