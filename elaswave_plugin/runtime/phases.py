"""Where a worker is: announces phases, fires the scripted test faults there, times recoveries."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elaswave_plugin.config import Kill
from elaswave_plugin.tracking.events import EventLog


class Phases:
    """The phase announcements of one worker; ``check`` raises EpochChanged when a view is open."""

    def __init__(
        self,
        *,
        slot: int,
        incarnation: int = 0,
        events: EventLog,
        kills: Sequence[Kill],
        check: Callable[[], None],
    ) -> None:
        self._slot = slot
        self._events = events
        me = slot, incarnation
        self._kills = [kill for kill in kills if (kill.slot, kill.incarnation) == me]
        self._check = check
        self.step = 0
        self.replaying = False
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Announce a phase of a step; leaves by EpochChanged when a view is proposed."""
        self.fire(phase)
        if self.replaying and phase == "backward":
            self.fire("replay")
        self._check()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A phase of a recovery; its seconds add up in ``seconds`` over superseded attempts."""
        started_s = time.monotonic()
        try:
            self.fire(phase)
            yield
        finally:
            elapsed_s = time.monotonic() - started_s
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed_s

    def fire(self, phase: str) -> None:
        """Kill this process where the script of test faults says so."""
        for kill in self._kills:
            if (kill.step, kill.phase) == (self.step, phase):
                self._events.emit(
                    "fault_fired",
                    slot=self._slot,
                    step=self.step,
                    phase=phase,
                    pid=os.getpid(),
                    at_s=time.time(),
                )
                os.kill(os.getpid(), signal.SIGKILL)
