"""Times the phases of a trainer, and tells its progress page how long each may take."""

from __future__ import annotations

import time

from elaswave_plugin.core.agreement.hang import (
    EVALUATION,
    START_LIMIT_S,
    UNKNOWN_LIMIT_S,
    PhaseLimits,
)
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS, ProgressPage

_FORWARD = "forward"
_NS = 1_000_000_000


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
