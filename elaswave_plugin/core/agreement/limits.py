"""The limits of hangs: how long each phase, and each work between steps, may stand still."""

from collections import deque
from statistics import median

DATA = "data"
"""The phase that waits for storage, whose stalls are nobody's hang."""
EVALUATION, SAVE = "evaluation", "save"
"""The work between steps of which more is known than that it may take long."""
STOPPED_LIMIT_S = 2.0
"""A signal may stop a worker for which others wait for so long, in whichever phase."""
START_LIMIT_S = 60.0
"""The limit of a phase of a step, or of an evaluation, that was not measured yet."""
SAVE_LIMIT_S = 60.0
"""A save may neither write nor compute for so long."""
CONNECTION_LIMIT_S = 300.0
"""Members of a native communicator may search for each other: thousands take minutes."""
UNKNOWN_LIMIT_S = 600.0
"""The limit of what nothing is known of: a script's own work between steps."""
ANNOUNCED_LIMIT_S = 1800.0
"""The limit of announced work: long enough for the save of a large model on slow storage."""
FACTOR = 3.0
"""A phase may take this many times its median."""
STEPS_FOR_A_MEDIAN = 3
STEPS_REMEMBERED = 15


class PhaseLimits:
    """The limits of each phase of a step without progress, from how long it has taken so far."""

    def __init__(
        self,
        floor_s: float,
        *,
        data_floor_s: float | None = None,
        start_s: float = START_LIMIT_S,
    ) -> None:
        """Set the least limit, ``floor_s``; ``data_floor_s``: the least for reading data.

        ``start_s``: the limit of what has no median yet.
        """
        self._floor_s = floor_s
        self._start_s = max(floor_s, start_s)
        self._data_floor_s = floor_s if data_floor_s is None else max(floor_s, data_floor_s)
        self._this_step: dict[str, float] = {}
        self._longest: dict[str, deque[float]] = {}
        self._limits: dict[str, float] = {}

    def note(self, phase: str, seconds: float) -> None:
        """Note that a phase took ``seconds``; it may come several times in a step."""
        if seconds > self._this_step.get(phase, 0.0):
            self._this_step[phase] = seconds

    def step_over(self) -> None:
        """Complete a step: of each phase, its longest time counts."""
        for phase, seconds in self._this_step.items():
            known = self._longest.setdefault(phase, deque(maxlen=STEPS_REMEMBERED))
            known.append(seconds)
            if len(known) >= STEPS_FOR_A_MEDIAN:
                floor_s = self._data_floor_s if phase == DATA else self._floor_s
                self._limits[phase] = max(floor_s, FACTOR * median(known))
        self._this_step = {}

    def drop_step(self) -> None:
        """Drop an interrupted step: its times say nothing."""
        self._this_step = {}

    def of(self, phase: str) -> float:
        """The limit of a phase in seconds."""
        return self._limits.get(phase) or self._start_s
