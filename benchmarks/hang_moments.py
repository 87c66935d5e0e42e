"""The moments in which a worker hangs in `benchmarks.hangs`, and the jobs that have them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery import KILL_STEP
from elaswave_plugin.config import KILL_WAYS, Kill

WAYS = tuple(way for way in KILL_WAYS if way != "kill")
# What nothing has measured yet has this limit, so that a run takes seconds.
START = "--elaswave-hang-start-timeout-s=5"
NATIVE = Path(__file__).resolve().parents[1] / "tests" / "stand_ins" / "native_gloo.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a job: the phases in which a worker hangs in ``step``, and in which ``ways``.

    ``seen_as``: the phase that the agent names, if it is another. ``arguments``: of the
    script, in which {directory} is that of the run; ``script``: one in the place of the example.
    """

    phases: tuple[str, ...] = ("forward", "backward")
    ways: tuple[str, ...] = WAYS
    step: int = KILL_STEP
    seen_as: str | None = None
    arguments: tuple[str, ...] = ()
    script: Path | None = None

    def hangs(self, runs: int, workers: int) -> list[Kill]:
        """Every slot in every phase, over and over, each time in another way."""
        places = itertools.cycle(enumerate(itertools.product(self.phases, range(workers))))
        rounds = len(self.phases) * workers
        return [
            Kill(
                slot=slot,
                step=self.step,
                phase=phase,
                how=self.ways[(place + run // rounds) % len(self.ways)],
            )
            for run, (place, (phase, slot)) in zip(range(runs), places, strict=False)
        ]

    def phase_of(self, hang: Kill) -> str:
        """The phase that the agent is to name."""
        return self.seen_as or hang.phase


def moments() -> dict[str, Moment]:
    """The moments by name; those beside "step" are of Megatron-Core's jobs."""
    every: Sequence[str] = (f"--eval-interval={KILL_STEP}", "--eval-iters=4")
    return {
        "step": Moment(phases=("forward", "backward", "data")),
        "first": Moment(step=1, arguments=(START,)),
        "evaluation": Moment(phases=("evaluation",), arguments=(START, *every)),
        # A loop would look like work.
        "save": Moment(
            phases=("finalize",),
            ways=("stop", "gil"),
            seen_as="save",
            arguments=("--save={directory}/saved", f"--save-interval={KILL_STEP}"),
        ),
        "native": Moment(script=NATIVE),
    }
