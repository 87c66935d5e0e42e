"""Whether a view pays that only deals the work of a job anew: for workers that got slow, or level.

It has to save, within `PAYS_WITHIN_STEPS` steps of median length, what it costs and what it costs
to take it back. And each comes later after the one before it than that did, so that a job is not
taken back and forth: 10, 40, 160, then 640 steps. That makes at most five in any 1,000.

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

from elaswave_plugin.core.dataflow import Dataflow, Slowness
from elaswave_plugin.core.layer_times import LayerTimes
from elaswave_plugin.core.pipeline_flow import Flow, PipelineFlow

PAUSE_S = 0.3
"""What such a view costs at least, and where none was measured; the demo's take 0.1 to 0.3 s."""
LEAST_GAIN = 0.05
"""Share of a step: sums that are shipped one by one cost something that no plan knows."""
PAYS_WITHIN_STEPS = 100
"""Also for the one that takes it back."""
APART_STEPS, APART_FACTOR, MOST_APART_STEPS = 10, 4, 640
STEPS_REMEMBERED = 16


class Payback:
    """What a view costs this job, ``pause_s``, and when the last one was asked for."""

    def __init__(self) -> None:
        self.pause_s = PAUSE_S
        self.asked: tuple[int, int] | None = None
        """How many have been, and before which step the last one."""
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    def note(self, *, step_s: float) -> None:
        """A step took so long."""
        self._steps_s.append(step_s)

    def pays(self, *, gain: float, step: int) -> bool:
        """Whether to ask before ``step`` for a view that saves ``gain``, a share of a step."""
        if self.asked is not None:
            count, last = self.asked
            if step < last + min(MOST_APART_STEPS, APART_STEPS * APART_FACTOR ** (count - 1)):
                return False
        step_s = median(self._steps_s) if self._steps_s else 0.0
        return PAYS_WITHIN_STEPS * gain * step_s >= 2 * self.pause_s

    def ask(self, *, step: int) -> None:
        """A view is asked for before ``step``."""
        count, _ = self.asked or (0, 0)
        self.asked = count + 1, step

    def restart(self, asked: tuple[int, int] | None) -> None:
        """A view begins, whose steps are others; ``asked``: as one of its workers has told."""
        self.asked = asked
        self._steps_s.clear()


def gain_of_view(now: Flow, wanted: Flow, *, slow: Slowness, times: LayerTimes) -> float:
    """The share of a step's compute that ``wanted`` saves, where the ``slow`` are as they are.

    Too little counts as nothing while somebody is slow. Nothing as well where samples are shared
    out: there nobody's layers are timed.
    """
    before_s, after_s = (_seconds(flow, slow, times) for flow in (now, wanted))
    gain = 1 - after_s / before_s
    return gain if gain >= LEAST_GAIN or not slow else 0.0


def _seconds(flow: Flow, slow: Slowness, times: LayerTimes) -> float:
    match flow:
        case PipelineFlow():
            return flow.simulated(times, slow).seconds
        case Dataflow():
            return flow.seconds(slow)
        case _:
            return 1.0
