"""Whether a view pays that only deals the work of a job anew: for workers that got slow, or level.

Nobody knows how long a worker stays as it is. So the job waits until as much has been lost to the
old deal as the change costs, there and back: then it has cost at most twice what it would have if
that had been known, and what passes sooner costs nothing.

>>> payback = Payback()
>>> [payback.step(gain=0.2, step_s=1.0) for _ in range(4)]
[False, False, True, False]
>>> payback.restart(gain=0.2, step_s=1.0)
>>> payback.step(gain=0.2, step_s=1.0)
True
"""

from elaswave_plugin.core.dataflow import Dataflow, Slowness
from elaswave_plugin.core.layer_times import LayerTimes
from elaswave_plugin.core.pipeline_flow import PipelineFlow
from elaswave_plugin.core.plan import Flow
from elaswave_plugin.core.slow import STEPS_TO_NAME

PAUSE_S = 0.3
"""What such a view costs at least, and where none was measured; the demo's take 0.1 to 0.3 s."""
LEAST_GAIN = 0.05
"""Share of a step: sums that are shipped one by one cost something that no plan knows."""


class Payback:
    """What the present deal has cost so far, against ``pause_s``, that of a view."""

    def __init__(self) -> None:
        self.pause_s = PAUSE_S
        self._lost_s = 0.0
        self._asked = False

    def restart(self, *, gain: float, step_s: float) -> None:
        """Who is slow has changed, which took some steps to find out: they count."""
        self._lost_s = (STEPS_TO_NAME - 1) * max(gain, 0.0) * step_s
        self._asked = False

    def step(self, *, gain: float, step_s: float) -> bool:
        """Whether to ask for a view after one more step, once; ``gain``: the share it would save.

        ``step_s``: what the step took.
        """
        if gain <= 0 or self._asked:
            return False
        self._lost_s += gain * step_s
        self._asked = self._lost_s >= 2 * self.pause_s
        return self._asked


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
