"""A newcomer waits until it reaches every member: one that cannot would hold all of them up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.handshake import Kind, prove
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import connect
from elaswave_plugin.tracking.events import EventLog

WITHIN_S = 2.0
AGAIN_S = 2.0
_AT_ONCE = 32


class Reach:
    """Tries the data addresses of the members, in a thread, until all answer."""

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
