"""Notes which nodes cannot be heard from here, and says so once each way.

The leader gives up those that it does not hear. Two others may lose each other's packets while it
hears both: the words are for those who look after the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elaswave_plugin.ipc.console import say
from elaswave_plugin.tracking.events import EventLog

# Where 5 % of the packets are lost, five in a row are not.
LIMIT_S = 5.0


class Silence(NamedTuple):
    """A node that is not heard, and since when (seconds since 1970)."""

    node: int
    since_s: float


class Unheard:
    """The nodes of which nothing comes to this one, ``node``."""

    def __init__(
        self, node: int, *, events: EventLog, clock: Callable[[], float] = time.time
    ) -> None:
        self._node = node
        self._events = events
        self._clock = clock
        self._since_s: dict[int, float] = {}

    @property
    def silences(self) -> tuple[Silence, ...]:
        """Those that are not heard now."""
        return tuple(Silence(*one) for one in sorted(self._since_s.items()))

    def look(self, silent: Mapping[int, float]) -> None:
        """Compare with how many seconds each of them has answered nothing.

        One that is not among them any more was lost, or has ended.
        """
        now_s = self._clock()
        self._since_s = {node: at_s for node, at_s in self._since_s.items() if node in silent}
        for node, silent_s in silent.items():
            was_unheard, is_unheard = node in self._since_s, silent_s > LIMIT_S
            if was_unheard == is_unheard:
                continue
            if is_unheard:
                self._since_s[node] = now_s - silent_s
                words = f"nothing of node {node} is heard here for {silent_s:.1f} s"
                kind, seconds = "unheard", silent_s
            else:
                seconds = now_s - self._since_s.pop(node)
                words = f"node {node} is heard here again after {seconds:.1f} s"
                kind = "heard_again"
            self._events.emit(kind, node=self._node, peer=node, seconds=seconds)
            say(f"node {self._node}: {words}")
