"""Bounds on time of an idle machine: on a busy one what is late is a warning, or is awaited."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen, TimeoutExpired
from typing import Any

# For how long something has waited for a processor, all in all, since the machine has booted.
PRESSURE = Path("/proc/pressure/cpu")
# The share of a measured time from which the machine counts as busy with other work.
BUSY = 0.5
# How many times as long as on an idle machine a hard limit waits at most.
MOST = 5


def waited_s() -> float:
    """Return the seconds in which any process of this machine has waited for a processor."""
    some = PRESSURE.read_text().splitlines()[0]
    return float(some.rpartition("total=")[2]) / 1e6


class Clock:
    """Measures how long something takes, and how busy the machine is meanwhile."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._waited_s = waited_s()

    def check(self, took_s: float, limit_s: float) -> None:
        """Fail where it took longer than the limit, unless others kept the machine busy."""
        if took_s < limit_s:
            return
        busy = (waited_s() - self._waited_s) / (time.monotonic() - self.began_s)
        text = (
            f"took {took_s:.3f} s, wanted less than {limit_s:g} s of an idle machine; in"
            f" {busy:.0%} of the time something waited for a processor"
        )
        assert busy > BUSY, text
        warnings.warn(text, stacklevel=3)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail where the block takes longer on an idle machine."""
    clock = Clock()
    yield
    clock.check(time.monotonic() - clock.began_s, limit_s)


class Deadline:
    """A hard limit, in seconds in which nothing waited for a processor: what hangs uses none."""

    def __init__(
        self,
        limit_s: float,
        now_s: Callable[[], float] = time.monotonic,
        waited_s: Callable[[], float] = waited_s,
    ) -> None:
        self._limit_s, self._now_s, self._busy_s = limit_s, now_s, waited_s
        self._began_s, self._waited_s = now_s(), waited_s()

    def left_s(self) -> float:
        """Return the seconds that are left if all is idle from now on, 0 once it has passed."""
        elapsed_s = self._now_s() - self._began_s
        idle_s = elapsed_s - (self._busy_s() - self._waited_s)
        return max(0.0, min(self._limit_s - idle_s, MOST * self._limit_s - elapsed_s))


def completed(command: Sequence[str], limit_s: float, **more: Any) -> CompletedProcess[str]:
    """Run a command to its end; raises TimeoutExpired where it takes longer, as a hard limit."""
    deadline = Deadline(limit_s)
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, **more) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=max(0.1, deadline.left_s()))
                return CompletedProcess(command, process.returncode, output, errors)
            except TimeoutExpired:
                if not deadline.left_s():
                    process.kill()
                    raise
