"""Notes which supervisors of other nodes cannot be heard from here, and says so once each way.

The leader gives up those that it does not hear. Two others may lose each other's packets while it
hears both: the words are for those who look after the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.tracking.events import EventLog

# Where 5 % of the packets are lost, five in a row are not.
LIMIT_S = 5.0


class Silence(NamedTuple):
    """A supervisor that is not heard, by slot, and since when (seconds since 1970)."""

    slot: int
    since_s: float


class Unheard:
    """The supervisors of which nothing comes to this one, of worker ``slot``."""

    def __init__(
        self, slot: int, *, events: EventLog, clock: Callable[[], float] = time.time
    ) -> None:
        self._slot = slot
        self._events = events
        self._clock = clock
        self._since_s: dict[int, float] = {}

    @property
    def silences(self) -> tuple[Silence, ...]:
        """Those that are not heard now."""
        return tuple(Silence(*one) for one in sorted(self._since_s.items()))

    def look(self, silent: Mapping[Peer, float], *, speaks: bool) -> None:
        """Compare with how many seconds each of them has answered nothing.

        One that is not among them any more was lost, or has ended. ``speaks``: to the log as well,
        once for each node.
        """
        now_s = self._clock()
        here = {peer.slot for peer in silent}
        self._since_s = {slot: at_s for slot, at_s in self._since_s.items() if slot in here}
        said: set[int] = set()
        for peer, silent_s in silent.items():
            was_unheard, is_unheard = peer.slot in self._since_s, silent_s > LIMIT_S
            if was_unheard == is_unheard:
                continue
            if is_unheard:
                self._since_s[peer.slot] = now_s - silent_s
                words = f"nothing of node {peer.node} is heard here for {silent_s:.1f} s"
                kind, seconds = "unheard", silent_s
            else:
                seconds = now_s - self._since_s.pop(peer.slot)
                words = f"node {peer.node} is heard here again after {seconds:.1f} s"
                kind = "heard_again"
            self._events.emit(kind, slot=self._slot, peer=peer.slot, seconds=seconds)
            if speaks and peer.node not in said:
                say(f"worker {self._slot}: {words} (worker {peer.slot}, {peer.control})")
            said.add(peer.node)
