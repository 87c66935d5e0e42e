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

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from elaswave_plugin.core.agreement.messages import Facts, Raised


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
