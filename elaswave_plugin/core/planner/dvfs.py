"""Clocks: the lowest for each stage that keep the step time, the highest for the bottleneck.

    tau_p(f) = work_p (compute_share / f + 1 - compute_share)       f relative to the present clock
    T* = the least T with  min {f : tau_p(f) <= T} for every stage within the power cap

>>> table = ClockTable(clocks=(0.8, 0.9, 1.0, 1.1))
>>> choice = minimax_clocks(work_s=(10.0, 12.0, 9.0), widths=(4, 3, 4), table=table)
>>> print(choice)
clocks 1.0 1.1 0.9: 10.91 s, 9827 W
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elaswave_plugin.errors import ConfigurationError

Clocks = tuple[float, ...]

# A prediction this much longer is the same: rounding of a sum of many operations.
SAME = 1e-9
# A clock that is raised has to shorten the step by more than this share of it.
WORTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTable:
    """The clocks that a worker can be set to, rising and relative to the present one.

    ``compute_share``: the part of an operation's time that falls with the clock. A worker draws
    ``static_w + dynamic_w f^3`` watts. Raises ConfigurationError.
    """

    clocks: tuple[float, ...]
    compute_share: float = 1.0
    static_w: float = 100.0
    dynamic_w: float = 800.0

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.clocks))
        if not self.clocks or not rising or self.clocks[0] <= 0:
            raise ConfigurationError(f"clocks are {self.clocks}, wanted rising numbers above 0")
        if not 0 <= self.compute_share <= 1:
            raise ConfigurationError(f"compute_share is {self.compute_share}, wanted 0 to 1")

    def speed(self, clock: float) -> float:
        """Operations per second at ``clock``, relative to those at clock 1."""
        return 1 / (self.compute_share / clock + 1 - self.compute_share)

    def watts(self, clock: float) -> float:
        """Return the power that a worker draws at ``clock``, in watts."""
        return self.static_w + self.dynamic_w * clock**3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChoice:
    """A clock for each stage, the seconds of the busiest stage or of the step, and the power."""

    clocks: tuple[float, ...]
    seconds: float
    watts: float

    def __str__(self) -> str:
        clocks = " ".join(f"{clock:g}" if clock != 1 else "1.0" for clock in self.clocks)
        return f"clocks {clocks}: {self.seconds:.4g} s, {self.watts:.0f} W"


def minimax_clocks(
    *,
    work_s: Sequence[float],
    widths: Sequence[int],
    table: ClockTable,
    power_cap_w: float = float("inf"),
) -> ClockChoice:
    """The lowest clocks that reach the least possible time of the busiest stage under the cap.

    ``work_s``: seconds of each stage's busiest worker at clock 1. Raises ConfigurationError where
    even the lowest clocks draw more than ``power_cap_w``.
    """
    steps = sorted({work / table.speed(clock) for work in work_s for clock in table.clocks})
    fastest = max(work / table.speed(table.clocks[-1]) for work in work_s)
    for limit_s in steps:
        if limit_s < fastest:
            continue
        clocks = tuple(
            next(clock for clock in table.clocks if work / table.speed(clock) <= limit_s)
            for work in work_s
        )
        watts = total_watts(clocks, widths, table)
        if watts <= power_cap_w:
            return ClockChoice(clocks=clocks, seconds=limit_s, watts=watts)
    lowest = total_watts([table.clocks[0]] * len(work_s), widths, table)
    raise ConfigurationError(
        f"power cap is {power_cap_w:.0f} W, and {sum(widths)} workers draw {lowest:.0f} W at their"
        " lowest clock; raise the cap"
    )


def predicted_clocks(
    *,
    work_s: Sequence[float],
    widths: Sequence[int],
    table: ClockTable,
    predict: Callable[[tuple[float, ...]], float],
    power_cap_w: float = float("inf"),
) -> ClockChoice:
    """Clocks by the predicted step time, which also knows bubbles: up where it helps, else down.

    ``predict`` gives the step seconds for the clocks of all stages. Climbs from `minimax_clocks`
    and, where they are allowed, from the present clocks; in the result no single stage can be one
    clock lower without a longer step.
    """
    starts = [
        minimax_clocks(work_s=work_s, widths=widths, table=table, power_cap_w=power_cap_w).clocks
    ]
    present = (1.0,) * len(widths)
    if 1.0 in table.clocks and total_watts(present, widths, table) <= power_cap_w:
        starts.append(present)

    def allowed(clocks: Clocks) -> bool:
        return total_watts(clocks, widths, table) <= power_cap_w

    seconds, clocks = min(
        _climbed(start, table, predict, allowed) for start in dict.fromkeys(starts)
    )
    lowered = True
    while lowered:
        lowered = False
        for stage in range(len(clocks)):
            lower = _changed(clocks, table, stage=stage, step=-1)
            while lower is not None and predict(lower) <= seconds * (1 + SAME):
                clocks, lowered = lower, True
                lower = _changed(clocks, table, stage=stage, step=-1)
    return ClockChoice(
        clocks=clocks, seconds=predict(clocks), watts=total_watts(clocks, widths, table)
    )


def total_watts(clocks: Sequence[float], widths: Sequence[int], table: ClockTable) -> float:
    """Sum the power that all workers draw, in watts."""
    return sum(width * table.watts(clock) for width, clock in zip(widths, clocks, strict=True))


def _climbed(
    clocks: Clocks,
    table: ClockTable,
    predict: Callable[[Clocks], float],
    allowed: Callable[[Clocks], bool],
) -> tuple[float, Clocks]:
    """Seconds and clocks once no single stage can be raised for a shorter step."""
    seconds = predict(clocks)
    while True:
        higher = [_changed(clocks, table, stage=stage, step=1) for stage in range(len(clocks))]
        raised = [(predict(one), one) for one in higher if one is not None and allowed(one)]
        best = min(raised, default=(seconds, clocks))
        if best[0] > seconds * (1 - WORTH):
            return seconds, clocks
        seconds, clocks = best


def _changed(
    clocks: tuple[float, ...], table: ClockTable, *, stage: int, step: int
) -> tuple[float, ...] | None:
    """The clocks with that of one stage one step higher or lower; None at the end of the table."""
    index = table.clocks.index(clocks[stage]) + step
    if not 0 <= index < len(table.clocks):
        return None
    return (*clocks[:stage], table.clocks[index], *clocks[stage + 1 :])
