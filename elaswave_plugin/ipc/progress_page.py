"""The progress page: shared memory in which a trainer says where it is, and for how long.

The trainer's main path writes it with plain stores, which cost under a microsecond; its agent reads
it without any help of the trainer, whose interpreter may be wedged. Each trainer gets a page of its
own, so that a late write of an older one goes nowhere.
"""

import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elaswave_plugin.core.agreement.hang import NOBODY, Sample
from elaswave_plugin.core.agreement.limits import (
    ANNOUNCED_LIMIT_S,
    CONNECTION_LIMIT_S,
    EVALUATION,
    SAVE,
    SAVE_LIMIT_S,
    START_LIMIT_S,
    UNKNOWN_LIMIT_S,
    PhaseLimits,
)
from elaswave_plugin.errors import ConfigurationError


def lease_clock_s() -> float:
    """Return the time in seconds since the machine has booted: the clock of leases.

    Others count on while this machine is suspended, and may give it up. Of the clocks that nobody
    sets, the monotonic one stands still then, which is right for the durations of hangs only.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


PROGRESS_FD = "ELASWAVE_PROGRESS_FD"
BETWEEN_STEPS = "between steps"
COMPILATION = "compilation"
CONNECTION = "connection"

_PAGE_BYTES = 4096
PAGE_NAME = "elaswave-progress"
# Words of eight bytes.
_SINCE_NS = 0
_PID = 1
_INCARNATION = 2
_EPOCH = 3
_STEP = 4
_OPERATIONS = 5
_WAITS_FOR = 6
_LIMIT_NS = 7
_DEPTH = 8
_LENT_UNTIL_NS = 9
_TOLD_TO_END = 10
_WAITS_IN = 11
_FLOOR_NS = 12
_STACK_FD = 13
_COMPILES = 14
_IN_KERNEL_LIMIT_NS = 15
# Pairs of words: a native communicator, and the calls on it that were entered.
_ENTERED = 16
MOST_ENTERED = 56
# Texts: the phase, then the announced ones, which may be nested.
_TEXTS = 1024
_TEXT_BYTES = 64
_MOST_ANNOUNCED = 7
# A word behind them: when the agent last said anything.
_AGENT_NS = 192
_NS = 1_000_000_000
_FOREVER_NS = 2**63 - 1


def create_page() -> int:
    """A descriptor of the memory of a new page."""
    fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
    size_page(fd)
    return fd


def page_of_worker(slot: int, incarnation: int) -> str:
    """The name of the memory of a trainer's page."""
    return f"{PAGE_NAME} of {slot}.{incarnation}"


def size_page(fd: int) -> None:
    """Give memory the size of a page."""
    os.ftruncate(fd, _PAGE_BYTES)


class ProgressPage:
    """Open the page behind a descriptor; without one, memory that no other process sees."""

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, _PAGE_BYTES)
        self._words = memoryview(self._memory).cast("q")
        if fd is None:
            self._words[_LENT_UNTIL_NS] = _FOREVER_NS  # without an agent nobody is given up

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        self._memory.close()

    # ---- what a trainer writes ----------------------------------------------------------------

    def begin(self, incarnation: int) -> None:
        """A trainer takes its page."""
        self._words[_PID] = os.getpid()
        self._words[_INCARNATION] = incarnation
        self._words[_WAITS_FOR] = NOBODY
        self.enter(BETWEEN_STEPS, UNKNOWN_LIMIT_S)

    def touch(self) -> None:
        """Something went on."""
        self._words[_SINCE_NS] = time.monotonic_ns()

    def enter(self, phase: str, limit_s: float) -> None:
        """A phase begins, which may stand still for so long."""
        # The time comes first: a reader in between sees a shorter standstill, never a longer.
        self._words[_SINCE_NS] = time.monotonic_ns()
        self._words[_LIMIT_NS] = int(limit_s * _NS)
        self._write_text(0, phase.encode())

    def set_floor(self, floor_s: float, *, in_kernel_s: float | None = None) -> None:
        """No phase is late before; ``in_kernel_s``: the limit of a sleep that no signal ends."""
        self._words[_FLOOR_NS] = int(floor_s * _NS)
        self._words[_IN_KERNEL_LIMIT_NS] = int((in_kernel_s or 0.0) * _NS)

    def set_place(self, *, epoch: int | None = None, step: int | None = None) -> None:
        """The view and the step of the work."""
        if epoch is not None:
            self._words[_EPOCH] = epoch
        if step is not None:
            self._words[_STEP] = step

    def count_operation(self) -> None:
        """An operation with other workers begins."""
        words = self._words
        words[_SINCE_NS] = time.monotonic_ns()
        words[_OPERATIONS] += 1

    def set_entered(self, index: int, communicator: int, calls: int) -> None:
        """So many calls on a native communicator have been entered; 0: it has ended."""
        # A reader in between sees none, never those of another communicator.
        at = _ENTERED + 2 * index
        self._words[at] = 0
        self._words[at + 1] = calls
        self._words[at] = communicator

    def waits_for(self, slot: int, operation: int = 0) -> None:
        """A slot, or one of NOBODY, COMMIT and OUTSIDE; the number of the operation that waits."""
        self._words[_SINCE_NS] = time.monotonic_ns()
        self._words[_WAITS_FOR] = slot
        self._words[_WAITS_IN] = operation

    @contextmanager
    def waiting(self, for_whom: int) -> Iterator[None]:
        """Wait for COMMIT or OUTSIDE."""
        self.waits_for(for_whom)
        try:
            yield
        finally:
            self.waits_for(NOBODY)

    def announce(self, phase: str) -> None:
        """A phase begins that is waited for; raises ConfigurationError for a name without room."""
        text = phase.encode()
        if not 0 < len(text) < _TEXT_BYTES:
            raise ConfigurationError(
                f"phase is {phase!r}, wanted a name of 1 to {_TEXT_BYTES - 1} bytes"
            )
        self.touch()
        depth = self._words[_DEPTH] + 1
        self._write_text(min(depth, _MOST_ANNOUNCED), text)
        self._words[_DEPTH] = depth

    def end_announced(self) -> None:
        """The newest announced phase is over."""
        self.touch()
        self._words[_DEPTH] = max(0, self._words[_DEPTH] - 1)

    def set_compiles(self, compiles: bool) -> None:
        """A compiler of torch's works in this process, or no longer does."""
        self.touch()
        self._words[_COMPILES] = compiles

    def offer_stack(self, fd: int) -> None:
        """This process writes its stack to its descriptor ``fd`` when it is asked for."""
        self._words[_STACK_FD] = fd

    # ---- what the agent writes ----------------------------------------------------------------

    def lend(self, until_s: float) -> None:
        """Let the trainer act for the job until then, by the clock of leases."""
        self._words[_LENT_UNTIL_NS] = int(max(0.0, until_s) * _NS)
        self._words[_AGENT_NS] = time.monotonic_ns()

    def tell_to_end(self) -> None:
        """The next signal that asks to end means this trainer."""
        self._words[_TOLD_TO_END] = 1

    # ---- what everyone reads ------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The trainer's process id; 0 before it began."""
        return self._words[_PID]

    @property
    def stack_fd(self) -> int:
        """The trainer's descriptor to which it writes its stack; 0 where it does not."""
        return self._words[_STACK_FD]

    @property
    def may_act(self) -> bool:
        """True if the trainer may act for the job: not before its agent has first lent it time."""
        return lease_clock_s() * _NS < self._words[_LENT_UNTIL_NS]

    @property
    def agent_ns(self) -> int:
        """The moment of the agent's last word, monotonic: it lives, whatever it lends."""
        return self._words[_AGENT_NS]

    @property
    def is_told_to_end(self) -> bool:
        """True if a signal that asks to end comes from the agent."""
        return bool(self._words[_TOLD_TO_END])

    @property
    def announced(self) -> str | None:
        """The announced phase in which the trainer is."""
        if self._words[_COMPILES]:
            return COMPILATION
        depth = self._words[_DEPTH]
        return self._text(min(depth, _MOST_ANNOUNCED)) if depth else None

    @property
    def awaits_another(self) -> bool:
        """True if the trainer cannot go on without something that others do."""
        return self._words[_WAITS_FOR] != NOBODY

    @property
    def is_save(self) -> bool:
        """True if the trainer, or what it has started for that, writes a checkpoint."""
        return self.announced == SAVE

    @property
    def since_s(self) -> float:
        """The time on the monotonic clock at which the trainer last made progress."""
        return self._words[_SINCE_NS] / _NS

    def sample(
        self,
        *,
        slot: int,
        awake_s: float = 0.0,
        waited_s: float = 0.0,
        worked_s: float = 0.0,
        held_s: float = 0.0,
        stopped_s: float | None = None,
        in_kernel_s: float | None = None,
    ) -> Sample | None:
        """Return what the page says now, None before the trainer began.

        Only time after `awake_s` counts, when the reader began to run (on the monotonic clock). The
        `waited_s` in which the trainer waited for a processor do not count, nor do the `held_s` in
        which the kernel held it, nor the first `worked_s`, in which it was seen at work that the
        page does not tell of, within the limit of announced work.
        """
        words = self._words
        if not words[_SINCE_NS]:
            return None
        announced = self.announced
        phase, limit_s = announced or self._text(0), words[_LIMIT_NS] / _NS
        floor_s = words[_FLOOR_NS] / _NS
        if announced == SAVE:
            limit_s = max(floor_s, SAVE_LIMIT_S)
        elif announced == CONNECTION:
            limit_s = max(floor_s, CONNECTION_LIMIT_S)
        elif announced not in (None, EVALUATION):
            limit_s = ANNOUNCED_LIMIT_S
        worked_s = min(worked_s, max(0.0, ANNOUNCED_LIMIT_S - limit_s))
        idle_s = waited_s + held_s
        waits_for, operations = words[_WAITS_FOR], words[_OPERATIONS]
        # The time comes last, as it comes first for the writer: what was read above is no newer.
        since_s = words[_SINCE_NS] / _NS
        return Sample(
            slot=slot,
            incarnation=words[_INCARNATION],
            epoch=words[_EPOCH],
            step=words[_STEP],
            phase=phase,
            operations=operations,
            stalled_s=max(0.0, time.monotonic() - max(since_s + worked_s, awake_s) - idle_s),
            limit_s=limit_s,
            waits_for=waits_for,
            stopped_s=stopped_s,
            waited_s=waited_s,
            waits_in=words[_WAITS_IN],
            floor_s=floor_s or UNKNOWN_LIMIT_S,
            announced=bool(announced),
            entered=self._entered(),
            in_kernel_s=in_kernel_s,
            in_kernel_limit_s=words[_IN_KERNEL_LIMIT_NS] / _NS or None,
        )

    def _entered(self) -> tuple[tuple[int, int], ...]:
        """The native communicators, and the calls on each that were entered."""
        words = self._words[_ENTERED : _ENTERED + 2 * MOST_ENTERED].tolist()
        pairs = zip(words[::2], words[1::2], strict=True)
        return tuple((communicator, calls) for communicator, calls in pairs if communicator)

    def _write_text(self, index: int, text: bytes) -> None:
        start = _TEXTS + index * _TEXT_BYTES
        self._memory[start : start + _TEXT_BYTES] = text.ljust(_TEXT_BYTES, b"\0")

    def _text(self, index: int) -> str:
        start = _TEXTS + index * _TEXT_BYTES
        text = self._memory[start : start + _TEXT_BYTES].rstrip(b"\0")
        return text.decode(errors="replace")


def page_fd(environ: Mapping[str, str]) -> int | None:
    """The descriptor that the guardian gave; None where this process did not get it."""
    number = environ.get(PROGRESS_FD)
    try:
        is_page = number is not None and PAGE_NAME in os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the variable came down to a child of the trainer, the descriptor did not
        return None
    return int(number) if number is not None and is_page else None


def page_of(environ: Mapping[str, str]) -> ProgressPage | None:
    """The page of the trainer that this process is; None where it is none (as in its children)."""
    fd = page_fd(environ)
    if fd is None:
        return None
    page = ProgressPage(fd)
    if page.pid == os.getpid():
        return page
    page.close()
    return None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Announce work that may take long on one worker: the others wait for it, up to half an hour.

    For an evaluation, a save or a download of the script's own, between or inside of steps. Outside
    an elastic job it does nothing. Raises ConfigurationError for a name over 63 bytes.
    """
    page = page_of(os.environ)
    if page is None:
        yield
        return
    try:
        page.announce(name)
        try:
            yield
        finally:
            page.end_announced()
    finally:
        page.close()


_FORWARD = "forward"


class PhaseClock:
    """The phases of one trainer: of its steps, of the work between them, of its recoveries."""

    def __init__(
        self,
        page: ProgressPage,
        *,
        floor_s: float,
        recovery_s: float,
        data_floor_s: float | None = None,
        start_s: float = START_LIMIT_S,
        in_kernel_s: float | None = None,
    ) -> None:
        """No phase is late before `floor_s`, no phase of a recovery before `recovery_s`.

        ``data_floor_s``: nor is the reading of data before this; ``start_s``: nor is what was not
        measured yet before this; ``in_kernel_s``: see `ProgressPage.set_floor`.
        """
        self._page = page
        page.set_floor(floor_s, in_kernel_s=in_kernel_s)
        self._limits = PhaseLimits(floor_s, data_floor_s=data_floor_s, start_s=start_s)
        self._passes = PhaseLimits(floor_s, start_s=start_s)
        self._start_s = max(floor_s, start_s)
        self._recovery_s = max(floor_s, recovery_s)
        self._phase: str | None = None
        # The work between steps and its limit; None in a step and in a recovery.
        self._between: tuple[str, float] | None = None
        self._entered_ns = 0

    def enter(self, phase: str) -> None:
        """A phase of a step begins."""
        self._leave()
        if self._page.announced is not None:
            # In an evaluation: what it took is no measure of a step.
            self._phase = None
            return self._page.touch()
        self._phase, self._between = phase, None
        self._page.enter(phase, self._limits.of(phase))

    def step_over(self) -> None:
        """A step is complete: what follows is the script's."""
        self._leave()
        self._limits.step_over()
        self.outside(BETWEEN_STEPS)

    def outside(self, phase: str) -> None:
        """Announce work that is no part of a step, and of unknown length."""
        self._phase = None
        self._between = phase, self._start_s if phase == EVALUATION else UNKNOWN_LIMIT_S
        self._page.enter(*self._between)

    def begin_pass(self) -> None:
        """A forward pass without a backward begins; only between steps it is one of its own."""
        if self._between is not None:
            self._entered_ns = time.monotonic_ns()
            self._page.enter(_FORWARD, self._passes.of(_FORWARD))

    def end_pass(self) -> None:
        """That pass is over: what follows is the script's."""
        if self._between is not None:
            self._passes.note(_FORWARD, (time.monotonic_ns() - self._entered_ns) / _NS)
            self._passes.step_over()
            self._page.enter(*self._between)

    def recover(self, phase: str) -> None:
        """A phase of a recovery begins; the interrupted step will be redone."""
        self._phase = self._between = None
        self._limits.drop_step()
        self._page.enter(phase, self._recovery_s)

    def _leave(self) -> None:
        now_ns = time.monotonic_ns()
        if self._phase is not None:
            self._limits.note(self._phase, (now_ns - self._entered_ns) / _NS)
        self._entered_ns = now_ns
