"""Ends what a trainer that died had started: a checkpoint writer, a data loader."""

from __future__ import annotations

import signal

from elaswave_plugin.runtime.lifeline import signal_group
from elaswave_plugin.runtime.reactor import Reactor


class Orphans:
    """The process groups that dead trainers have led, until nothing is left of them."""

    def __init__(self, reactor: Reactor, *, grace_s: float) -> None:
        """SIGKILL comes `grace_s` seconds after SIGTERM."""
        self._reactor = reactor
        self._grace_s = grace_s
        self._leaders: set[int] = set()

    @staticmethod
    def end_now(leader_pid: int) -> None:
        """End what a lost trainer had started, by SIGKILL: a writer of its could still write.

        The others write the same checkpoint again. A script that handles SIGTERM hands that on to
        the processes that it forks, so that it would end none of them.
        """
        if leader_pid:
            signal_group(leader_pid, signal.SIGKILL)

    def end(self, leader_pid: int) -> None:
        """End what is left of the group of a trainer that is done.

        Only a group that still has members is signalled again, so that its number is not reused.
        """
        if leader_pid and signal_group(leader_pid, signal.SIGTERM):
            self._leaders.add(leader_pid)
            self._reactor.after(self._grace_s, self.kill)

    def kill(self) -> None:
        """SIGKILL to all that are left, at once."""
        while self._leaders:
            signal_group(self._leaders.pop(), signal.SIGKILL)
