"""The payback of a view that only deals work again, for workers that became slow, or level again.

It has to save, within `PAYS_WITHIN_STEPS` steps of median length, its cost and the cost to undo it;
what sums of gradients cost more under it is taken from what a step saves. A view that was asked for
a slow worker is taken back where steps got longer. The distance between such views grows, so that a
job does not go back and forth: 10, 40, 160, then 640 steps. That makes at most six in any 1,000,
the last of which takes one back.

>>> payback = Payback()
>>> payback.note(step_s=1.0)
>>> payback.pays(gain=0.005, step=6), payback.pays(gain=0.2, step=6)
(False, True)
>>> payback.pays(gain=0.2, step=6, more_s=0.195)
False
>>> payback.ask(step=6)
>>> payback.pays(gain=0.2, step=15), payback.pays(gain=0.2, step=16)
(False, True)
>>> payback.restart(payback.asked, same_members=True)
>>> for step_s in (1.2, 1.2, 0.9, 1.1, 1.3, 0.9, 1.1, 1.2):
...     payback.note(step_s=step_s)
>>> print(payback.worse())
steps take 1.15 s instead of 1 s
"""

from collections import deque
from statistics import median
from typing import NamedTuple

from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.step.dataflow import Shares, Slowness

PAUSE_S = 0.3
"""The least cost of such a view, and that of one never measured; the demo's take 0.1 to 0.3 s."""
LEAST_GAIN = 0.05
"""Share of a step: less is noise."""
PAYS_WITHIN_STEPS = 100
"""Includes the view that undoes it."""
APART_STEPS, APART_FACTOR, MOST_APART_STEPS = 10, 4, 640
STEPS_REMEMBERED = 16
STEPS_TO_JUDGE = 8
"""Of the steps of a view; three in four of them have to be longer than before it."""


class Asked(NamedTuple):
    """The last view that was asked for: number, step before which, whether it took one back."""

    number: int
    step: int
    takes_back: bool = False


class Payback:
    """The cost of a view in this job, ``pause_s``, and the last view that was asked for."""

    def __init__(self) -> None:
        self.pause_s = PAUSE_S
        self.asked: Asked | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        # The step before the view that was asked for, and before the present one, if it was that.
        self._asked_s: float | None = None
        self._before_s: float | None = None

    def note(self, *, step_s: float) -> None:
        """Note the seconds of a step."""
        self._steps_s.append(step_s)

    def pays(self, *, gain: float, step: int, more_s: float = 0.0) -> bool:
        """Return whether to ask before ``step`` for a view that saves ``gain`` of a step.

        ``more_s``: the seconds by which the sums of a step take longer under it.
        """
        if self.asked is not None:
            apart = APART_STEPS * APART_FACTOR ** (self.asked.number - 1)
            if step < self.asked.step + min(MOST_APART_STEPS, apart):
                return False
        saved_s = gain * self._step_s - more_s
        return gain > 0 and PAYS_WITHIN_STEPS * saved_s >= 2 * self.pause_s

    @property
    def _number(self) -> int:
        """That of the next view."""
        return 1 if self.asked is None else self.asked.number + 1

    @property
    def _step_s(self) -> float:
        return median(self._steps_s) if self._steps_s else 0.0

    def ask(self, *, step: int, is_judged: bool = True) -> None:
        """Note that a view is asked for before ``step``; ``is_judged``: by its steps."""
        self.asked = Asked(self._number, step)
        self._asked_s = self._step_s if is_judged else None

    def worse(self) -> str | None:
        """Say that steps are longer than before the view that was asked for; None if they are not.

        Known to who has asked for it, while its members are the same.
        """
        steps_s = [*self._steps_s][-STEPS_TO_JUDGE:]
        if self._before_s is None or len(steps_s) < STEPS_TO_JUDGE:
            return None
        if sorted(steps_s)[STEPS_TO_JUDGE // 4] <= self._before_s:
            return None
        return f"steps take {median(steps_s):.3g} s instead of {self._before_s:.3g} s"

    def take_back(self, *, step: int) -> None:
        """Note that a view is asked for that deals as if nobody were slow."""
        self.asked = Asked(self._number, step, takes_back=True)
        self._asked_s = self._before_s = None

    def restart(self, asked: Asked | None, *, same_members: bool = False) -> None:
        """Begin a view, in which steps differ; ``asked``: as one of its workers has told."""
        self._before_s = self._asked_s if same_members and asked == self.asked else None
        self.asked, self._asked_s = asked, None
        self._steps_s.clear()


def gain_of_view(now: Flow, wanted: Flow, *, slow: Slowness, times: LayerTimes) -> float:
    """Return the share of a step's compute that ``wanted`` saves, if the ``slow`` stay so.

    A small gain counts as 0 while a worker is slow.
    """
    before_s, after_s = (_seconds(flow, slow, times) for flow in (now, wanted))
    gain = 1 - after_s / before_s
    return gain if gain >= LEAST_GAIN or not slow else 0.0


def more_sums(now: Flow, wanted: Flow) -> int:
    """Return how many more sums of micro-batches a worker sends apart under ``wanted``."""
    before, after = (0 if isinstance(one, Shares) else one.sent_apart for one in (now, wanted))
    return after - before


def _seconds(flow: Flow, slow: Slowness, times: LayerTimes) -> float:
    match flow:
        case PipelineFlow():
            return flow.simulated(times, slow).seconds
        case _:
            return flow.seconds(slow)
