"""The payback of a view that only deals work again, for workers that became slow, or level again.

It has to save, within `PAYS_WITHIN_STEPS` steps of median length, its cost and the cost to undo it.
The distance between such views grows, so that a job does not go back and forth: 10, 40, 160, then
640 steps. That makes at most five in any 1,000.

>>> payback = Payback()
>>> payback.note(step_s=1.0)
>>> payback.pays(gain=0.005, step=6), payback.pays(gain=0.2, step=6)
(False, True)
>>> payback.ask(step=6)
>>> payback.pays(gain=0.2, step=15), payback.pays(gain=0.2, step=16)
(False, True)
"""

from collections import deque
from statistics import median

from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.step.dataflow import Slowness

PAUSE_S = 0.3
"""The least cost of such a view, and that of one never measured; the demo's take 0.1 to 0.3 s."""
LEAST_GAIN = 0.05
"""Share of a step: sums that are sent one by one have a cost that no plan knows."""
PAYS_WITHIN_STEPS = 100
"""Includes the view that undoes it."""
APART_STEPS, APART_FACTOR, MOST_APART_STEPS = 10, 4, 640
STEPS_REMEMBERED = 16


class Payback:
    """The cost of a view in this job, ``pause_s``, and the last view that was asked for."""

    def __init__(self) -> None:
        self.pause_s = PAUSE_S
        self.asked: tuple[int, int] | None = None
        """Their number, and the step before which the last one was asked for."""
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    def note(self, *, step_s: float) -> None:
        """Note the seconds of a step."""
        self._steps_s.append(step_s)

    def pays(self, *, gain: float, step: int) -> bool:
        """Return whether to ask before ``step`` for a view that saves ``gain`` of a step."""
        if self.asked is not None:
            count, last = self.asked
            if step < last + min(MOST_APART_STEPS, APART_STEPS * APART_FACTOR ** (count - 1)):
                return False
        step_s = median(self._steps_s) if self._steps_s else 0.0
        return PAYS_WITHIN_STEPS * gain * step_s >= 2 * self.pause_s

    def ask(self, *, step: int) -> None:
        """Note that a view is asked for before ``step``."""
        count, _ = self.asked or (0, 0)
        self.asked = count + 1, step

    def restart(self, asked: tuple[int, int] | None) -> None:
        """Begin a view, in which steps differ; ``asked``: as one of its workers has told."""
        self.asked = asked
        self._steps_s.clear()


def gain_of_view(now: Flow, wanted: Flow, *, slow: Slowness, times: LayerTimes) -> float:
    """Return the share of a step's compute that ``wanted`` saves, if the ``slow`` stay so.

    A small gain counts as 0 while a worker is slow.
    """
    before_s, after_s = (_seconds(flow, slow, times) for flow in (now, wanted))
    gain = 1 - after_s / before_s
    return gain if gain >= LEAST_GAIN or not slow else 0.0


def _seconds(flow: Flow, slow: Slowness, times: LayerTimes) -> float:
    match flow:
        case PipelineFlow():
            return flow.simulated(times, slow).seconds
        case _:
            return flow.seconds(slow)
