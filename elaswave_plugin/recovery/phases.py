"""Tracks a worker's place: announces phases, fires the scripted test faults, times recoveries."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from elaswave_plugin.config import FINALIZE_PHASE, SAVE_PHASE, STEP_PHASES, Kill
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS, PhaseClock, ProgressPage
from elaswave_plugin.tracking.events import EventLog

_LOOK_S = 0.001


def strike(how: str) -> NoReturn:
    """Die ("kill"), or hang: "loop" in Python, "gil" in C with the interpreter's lock, "stop"."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "gil":
            # PyDLL keeps the lock during the call.
            ctypes.PyDLL(None).sleep(3600)


@contextlib.contextmanager
def once_written(folder: Path, fire: Callable[[], None]) -> Iterator[None]:
    """Call ``fire()`` from a thread as soon as a file of the folder has a byte, in this block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if bytes_in(folder):
                return fire()

    thread = threading.Thread(target=watch, name="elaswave-fault", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bytes_in(folder: Path) -> int:
    """Count the bytes of the files of a folder, which others may write and remove meanwhile."""
    written = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                written += 0 if path.is_dir() else path.stat().st_size
    return written


class Compilations:
    """The compilations of one trainer, on its progress page."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page

    def watch(self) -> None:
        """Have torch tell of them from now on, if its compiler is imported, which takes a second.

        Again and again, since `torch._dynamo.reset()` forgets who is told. Source: torch,
        torch/_dynamo/callback.py, which serialises the calls and makes them for the outermost
        compilation only.
        """
        callbacks: Any = sys.modules.get("torch._dynamo.callback")
        told = getattr(callbacks, "callback_handler", None)
        if told is not None and self._begin not in told.start_callbacks:
            told.register_start_callback(self._begin)
            told.register_end_callback(self._end)

    def _begin(self, *args: Any) -> None:
        self._page.set_compiles(True)

    def _end(self, *args: Any) -> None:
        self._page.set_compiles(False)


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
        page: ProgressPage,
        clock: PhaseClock,
    ) -> None:
        """`page` and `clock` tell the agent where this worker is."""
        self._slot = slot
        self._events = events
        me = slot, incarnation
        self._kills = [kill for kill in kills if (kill.slot, kill.incarnation) == me]
        self._check = check
        self._page = page
        self._clock = clock
        self._compilations = Compilations(page)
        self._step = 0
        # The folder of the checkpoint that is being written.
        self._draft: Path | None = None
        self.replaying = False
        self.seconds: dict[str, float] = {}
        self.began_s: float | None = None
        """When the step began that runs, by the monotonic clock; None between two steps."""

    @property
    def step(self) -> int:
        """The number of the step of the work."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._page.set_place(step=number)

    def begin_step(self, number: int) -> None:
        """A step begins, or begins again."""
        self.step, self.began_s = number, time.monotonic()
        self._clock.enter("begin")

    def end_step(self) -> None:
        """A step is complete; the script may do what it wants before the next."""
        self.began_s = None
        self._clock.step_over()

    def between_steps(self) -> None:
        """Announce the script's own work, of unknown length."""
        self.began_s = None
        self._clock.outside(BETWEEN_STEPS)

    def announce(self, phase: str) -> None:
        """Announce a phase."""
        self._compilations.watch()
        if phase in STEP_PHASES:
            self._clock.enter(phase)
        else:
            self._clock.outside(phase)

    def enter(self, phase: str) -> None:
        """Announce a phase of a step; leaves by EpochChanged when a view is proposed."""
        self.announce(phase)
        # A fault of a save waits for its first byte: see `writing`.
        if phase != SAVE_PHASE:
            self.fire(phase)
        if self.replaying and phase == "backward":
            self.fire("replay")
        self._check()

    def begin_pass(self) -> None:
        """Announce a forward pass that has no backward, as of an evaluation."""
        self._clock.begin_pass()

    def end_pass(self) -> None:
        """Announce the end of that pass."""
        self._clock.end_pass()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A phase of a recovery; its seconds add up in ``seconds`` over superseded attempts."""
        started_s = time.monotonic()
        self._clock.recover(phase)
        try:
            self.fire(phase)
            yield
        finally:
            elapsed_s = time.monotonic() - started_s
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed_s

    @contextmanager
    def writing(self, draft: Path) -> Iterator[None]:
        """Note that all write parts of a checkpoint to this folder, until the block ends.

        A fault of a save fires once the folder has a byte of any worker.
        """
        self._draft = draft
        # A loop has to be the main thread's: it would hang nothing else.
        sudden = any(kill.how != "loop" for kill in self._due(SAVE_PHASE))
        try:
            with once_written(draft, lambda: self.fire(SAVE_PHASE)) if sudden else nullcontext():
                yield
            self.fire(SAVE_PHASE)
            self.fire(FINALIZE_PHASE)
        finally:
            self._draft = None

    def fire(self, phase: str) -> None:
        """Kill this process, or have it hang, where the script of test faults says so."""
        self.faults_of(phase)()

    def faults_of(self, phase: str) -> Callable[[], None]:
        """Return what fires the faults of a phase of the present step, whenever it is called."""
        kills = self._due(phase)

        def fire() -> None:
            for kill in kills:
                self._events.emit(
                    "fault_fired",
                    slot=self._slot,
                    step=kill.step,
                    phase=phase,
                    pid=os.getpid(),
                    at_s=time.time(),
                    **self.written(),
                )
                strike(kill.how)

        return fire

    def written(self) -> dict[str, int]:
        """Count the bytes of the checkpoint that is being written; empty while none is."""
        return {} if self._draft is None else {"bytes_written": bytes_in(self._draft)}

    def _due(self, phase: str) -> list[Kill]:
        return [kill for kill in self._kills if (kill.step, kill.phase) == (self.step, phase)]
