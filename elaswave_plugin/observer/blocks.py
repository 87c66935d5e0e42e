"""Blocks of steps of one job, on and off in turn: the kind of each step, and the cost of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from elaswave_plugin.observer.run import RunFiles, counted_steps

BLOCK_STEPS = 10
# The first steps of a job touch memory and open links for the first time.
WARM_UP_STEPS = 2


def is_on(step: int) -> bool:
    """Return whether the alternated part is on in this step: in the first block, the third, ..."""
    return step // BLOCK_STEPS % 2 == 0


def is_measured(step: int) -> bool:
    """Return whether a step counts: no warm-up, and not the one in which the part was switched."""
    return step >= WARM_UP_STEPS and step % BLOCK_STEPS != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """The measured values of the steps that ran with the part on, and with it off."""

    on: tuple[float, ...]
    off: tuple[float, ...]

    def __str__(self) -> str:
        return f"{len(self.on)} values on, {len(self.off)} off"

    @property
    def ratio_of_medians(self) -> float | None:
        """Median on / median off; None where one of them has no value."""
        return median(self.on) / median(self.off) if self.on and self.off else None


def step_times_s(run: RunFiles) -> OnOff:
    """Return the seconds of every measured step, those of its slowest worker."""
    return split_blocks(
        (step, max(float(record["step_s"]) for record in records))
        for step, records in counted_steps(run).items()
    )


def split_blocks(values: Iterator[tuple[int, float]]) -> OnOff:
    """Divide the values of steps, which come with them, into on and off; those that count."""
    measured = [(step, value) for step, value in values if is_measured(step)]
    return OnOff(
        on=tuple(value for step, value in measured if is_on(step)),
        off=tuple(value for step, value in measured if not is_on(step)),
    )
