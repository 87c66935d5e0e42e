"""The life of a trainer: how far it is with its work, and what has become of its process (pure).

>>> life = Life(incarnation=1)
>>> for stage in (Stage.BUILDING, Stage.TRAINING, Stage.QUIESCED, Stage.TRAINING):
...     life.reach(stage)
>>> life.reach(Stage.WAITING_TO_ENTER)  # said once more, to an agent's next life
>>> life.phase, life.works
('training', True)
>>> life.process = Process.GONE
>>> life.phase, life.works
('exited', False)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from elaswave_plugin.core.agreement.messages import Facts, Raised

# The survivors' recovery goes first: building a trainer takes processor time.
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_SAME_STEP = 3


def delay_or_reason(deaths: Sequence[int], *, limit: int) -> float | str:
    """Return after how many seconds the next trainer starts, or why the slot stays empty.

    ``deaths``: the step of each on this slot, the newest last; ``limit``: of the starts.

    >>> [delay_or_reason([7], limit=5), delay_or_reason([7, 9], limit=5)]
    [0.5, 1.0]
    >>> delay_or_reason([7, 9, 9, 9], limit=5)
    '3 trainers died at step 9: see what they have printed, and the device; it may join again later'
    >>> delay_or_reason([7, 9], limit=1)
    'it was started again 1 times, the limit of respawn'
    """
    before, step = len(deaths) - 1, deaths[-1]
    if before == limit:
        return f"it was started again {limit} times, the limit of respawn"
    if deaths.count(step) == _SAME_STEP:
        same = f"{_SAME_STEP} trainers died at step {step}"
        return f"{same}: see what they have printed, and the device; it may join again later"
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0**before)


class Stage(IntEnum):
    """The stages of a trainer's work, in order; those of a worker of the launch skip some."""

    STARTING = auto()
    BUILDING = auto()
    JOINED = auto()
    WAITING_TO_ENTER = auto()
    TRAINING = auto()
    STOPPING = auto()
    QUIESCED = auto()
    LEAVING = auto()
    FINISHED = auto()


class Process(IntEnum):
    """The states of a trainer's process, in order.

    ENDS: for sure, once its memory is freed; STUCK: SIGKILL has not ended it. Both count as gone.
    REPLACED: another one is to be started in its place.
    """

    RUNS = auto()
    ENDS = auto()
    STUCK = auto()
    GONE = auto()
    REPLACED = auto()


@dataclass(slots=True, kw_only=True)
class Life:
    """One incarnation of a worker, as its node keeps it for the next agent.

    `facts`: it has joined, or waits to be let in; `announced`: the phase for which the others wait;
    `saves_last`: it writes a checkpoint with all others where all leave; `returns`: it leaves, and
    another comes in its place; `raised`: what ended its script; `end`: evidence and exit code.
    """

    incarnation: int
    stage: Stage = Stage.STARTING
    process: Process = Process.RUNS
    facts: Facts | None = None
    announced: str | None = None
    saves_last: bool = False
    returns: bool = False
    raised: Raised | None = None
    end: tuple[str, int | None] | None = None

    def reach(self, stage: Stage) -> None:
        """Go on to a stage; a member stops and trains again, and nothing else goes back.

        One that waits to be let in stops for the view with it too, and goes on waiting.
        """
        stops = Stage.STOPPING, Stage.QUIESCED
        if stage in stops:
            goes_on = Stage.TRAINING <= self.stage <= Stage.QUIESCED
        else:
            goes_on = stage > self.stage or (stage is Stage.TRAINING and self.stage in stops)
        if goes_on:
            self.stage, self.announced = stage, None

    @property
    def lives(self) -> bool:
        """True unless its process is gone, or as good as gone."""
        return self.process is Process.RUNS

    @property
    def works(self) -> bool:
        """True if it may be asked to take part in a view."""
        return self.lives and self.stage < Stage.LEAVING

    @property
    def has_come(self) -> bool:
        """True once it has joined, or waits to be let in."""
        return self.stage >= Stage.JOINED

    @property
    def has_entered(self) -> bool:
        """True once a view with it was delivered to it."""
        return self.stage >= Stage.TRAINING

    @property
    def is_member(self) -> bool:
        """True while it takes part in the training."""
        return self.works and self.has_entered

    @property
    def is_replacement(self) -> bool:
        """True if it was started in the place of one that was lost, or beyond the launch."""
        return self.incarnation > 0

    @property
    def phase(self) -> str:
        """The phase that `elaswave status` shows, as "waiting to enter"."""
        if not self.lives and self.stage < Stage.LEAVING:
            return "exited"
        return self.announced or self.stage.name.lower().replace("_", " ")
