"""The nodes that cannot be heard, or not reached, from here: said once, and waited for.

The leader gives up those that it does not hear. Two others may lose each other's packets while it
hears both: the words are for those who look after the network.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.silence import Answers
from elaswave_plugin.ipc.wire import connect
from elaswave_plugin.tracking.events import EventLog

WITHIN_S = 2.0
AGAIN_S = 2.0
_AT_ONCE = 32


class Reach:
    """Has a newcomer wait until all members answer at their data addresses, tried in a thread.

    One that does not reach them would hold all of them up.
    """

    def __init__(self, reactor: Reactor, *, secret: Secret, events: EventLog) -> None:
        self._reactor = reactor
        self._secret = secret
        self._events = events
        self._said: dict[int, tuple[int, ...]] = {}

    def wait(
        self,
        slot: int,
        members: Callable[[], Mapping[int, str]],
        *,
        wanted: Callable[[], bool],
        then: Callable[[], None],
    ) -> None:
        """Call ``then()`` in the reactor once all ``members()``, by node, are reached from here.

        It ends without where it is no longer ``wanted()``.
        """
        addresses = members()

        def attempt() -> None:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                reached = threads.map(self._answers, addresses.values())
                missing = tuple(
                    node for node, is_there in zip(addresses, reached, strict=True) if not is_there
                )
            self._reactor.post(lambda: decide(missing))

        def decide(missing: tuple[int, ...]) -> None:
            if not wanted():
                return
            self._say(slot, missing, addresses)
            if not missing:
                then()
                return
            self._reactor.after(AGAIN_S, lambda: self.wait(slot, members, wanted=wanted, then=then))

        threading.Thread(target=attempt, name="reach", daemon=True).start()

    def _answers(self, address: str) -> bool:
        try:
            with connect(address, WITHIN_S) as sock:
                prove(sock, self._secret, Kind.SERVER, timeout_s=WITHIN_S)
        except OSError:
            return False
        return True

    def _say(self, slot: int, missing: tuple[int, ...], addresses: Mapping[int, str]) -> None:
        """Once where others are missing than before, and once where none is any more."""
        if missing == self._said.get(slot, ()):
            return
        self._said[slot] = missing
        self._events.emit("unreached", slot=slot, nodes=list(missing))
        if not missing:
            say(f"worker {slot} reaches all members again")
            return
        names = ", ".join(f"{node} ({addresses[node]})" for node in missing)
        say(
            f"worker {slot} is built and stays out while it cannot reach nodes {names};"
            f" it tries again every {AGAIN_S:g} s"
        )


# The time that one has beyond a good network, as a factor. A lease only ends earlier.
MORE = 2.0


class Resent:
    """Notes what is sent again to each agent: one on a bad network has more time than a silent one.

    Where packets are lost a beat is sent again until it arrives, which can take longer than
    ``timeout_s``, the limit of a silence. Its machine answers meanwhile, and what goes to it is
    sent again as well; a machine that is gone answers nothing, and to a stopped process on a good
    network nothing is sent again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Packets sent again to each so far, and when the number last rose.
        self._known: dict[int, tuple[int, float]] = {}

    def limit_s(self, node: int, answers: Answers, *, now_s: float) -> float:
        """Return for how long nothing may be heard of an agent; to be asked at each beat."""
        before, rose_s = self._known.get(node, (answers.sent_again, -self._timeout_s))
        if answers.sent_again > before:
            rose_s = now_s
        self._known[node] = answers.sent_again, rose_s
        loses_packets = now_s - rose_s < self._timeout_s
        is_there = answers.silent_s < self._timeout_s / 2
        return self._timeout_s * (MORE if loses_packets and is_there else 1.0)

    def forget(self, node: int) -> None:
        """Another connection takes the place of an agent's."""
        self._known.pop(node, None)


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
