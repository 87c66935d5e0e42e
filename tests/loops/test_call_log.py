"""Random loops whose calls are interrupted anywhere: each call returns once, as without that."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.call_log import CallLog

PROGRAMS = 200


class Job:
    """Stands for a worker, its state and its recoveries: numbers in place of tensors.

    What the shards have is ``weights``; ``gradients`` are dropped in a recovery; the script sets
    ``setting``; ``position`` is where its data are.
    """

    def __init__(self, dice: random.Random, *, interrupts: int, without: str = "") -> None:
        self._dice, self._without = dice, without
        self._due = sorted(dice.sample(range(120), interrupts))
        self._points = 0
        self.recoveries = 0
        self.weights, self.gradients, self.setting, self.position = 1, 0, 1, 0
        # Weights and setting after so many steps.
        self._sealed = {0: (1, 1)}
        self._before: dict[int, dict[str, int]] = {}
        # Of the worker, as the loop asks for it.
        self.completed, self.detached = 0, False
        self.view = SimpleNamespace(epoch=1)
        self.phases = SimpleNamespace(step=0, enter=lambda phase: self.point())
        self.relief = SimpleNamespace(step=lambda work: work())
        self.links = SimpleNamespace(detached=False)
        # Of the steps and of what they keep.
        self.worker = self
        self.state = self
        self.works_done = 0
        self.remembered_steps, self.is_updated = 2, True
        self.blame: Any = None

    def point(self) -> None:
        """Something in which a loss may be met."""
        self._points += 1
        if self._due and self._points >= self._due[0]:
            self._due.pop(0)
            raise EpochChanged(self.view.epoch + 1, "a loss")

    # ---- the steps ------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.completed in self._before:
            self.put_back(self._before[self.completed])
        else:
            self._before[self.completed] = self.keep()
        self.point()

    def complete(self, report: StepReport | None = None) -> None:
        """Of a step: it is sealed. Of the state: it is there."""
        self.point()
        if report is not None:
            self.completed += 1
            self._sealed[self.completed] = self.weights, self.setting
            self._sealed.pop(self.completed - 2, None)
            # Others may have seen less of it.
            self.point()

    def announced(self, work: Callable[[], Any], phase: str) -> Any:
        self.point()
        return work()

    def finish_work(self) -> None:
        self.point()
        self.works_done += 1
        self.point()

    def recover(self) -> None:
        """Back to one of the last two seals."""
        self.recoveries += 1
        self.view = SimpleNamespace(epoch=self.view.epoch + 1)
        self.completed = self._dice.choice([*self._sealed])
        self._sealed = {n: one for n, one in self._sealed.items() if n <= self.completed}
        (self.weights, self.setting), self.gradients = self._sealed[self.completed], 0

    def note_recovery(self) -> None:
        self.point()

    def sealed_everywhere(self) -> None:
        self.point()

    # ---- what a step keeps ----------------------------------------------------------------------

    def keep(self) -> dict[str, int]:
        kept = {"setting": self.setting, "position": self.position}
        kept.pop(self._without, None)
        return kept

    def put_back(self, kept: dict[str, int]) -> None:
        vars(self).update(kept)


class Script:
    """A loop of its own, which notes what its calls return."""

    def __init__(self, job: Job, *, keeps: bool = True) -> None:
        self._job, self._keeps = job, keeps
        self._log = CallLog(job)  # type: ignore[arg-type]
        self.returned: list[Any] = []

    def run(self, program: list[list[str]]) -> list[Any]:
        """Make the calls of each step; returns what they have returned, and the weights."""
        self._log.start()
        for calls in program:
            for call in calls:
                self.returned.append(getattr(self, f"_{call}")())
        return [*self.returned, self._job.weights, self._job.setting, self._job.position]

    def _keep(self) -> Callable[[], None]:
        setting = self._job.setting

        def put_back() -> None:
            if self._keeps:
                self._job.setting = setting

        return put_back

    def _passes(self) -> Any:
        job = self._job

        def work() -> int:
            first, job.position = job.position, job.position + 2
            for number in (first, first + 1):
                job.point()
                job.gradients = hash((job.gradients, job.weights, number, job.setting))
            job.point()
            return job.gradients

        return self._log.part(work, keep=self._keep)

    def _update(self) -> Any:
        job, results = self._job, list[int]()
        put_back, epoch = self._keep(), job.view.epoch

        def attempt(step: int) -> StepReport:
            if job.view.epoch != epoch:
                put_back()
            job.point()
            job.weights = hash((job.weights, job.gradients, job.setting))
            job.gradients = 0
            job.point()
            results.append(job.weights)
            return StepReport(loss=0.0, grad_norm=0.0, lr=0.0, tokens=0)

        self._log.step(attempt)
        return results[-1]

    def _schedule(self) -> None:
        self._job.setting += 1

    def _evaluation(self) -> Any:
        job = self._job

        def work() -> int:
            first, job.position = job.position, job.position + 1
            job.point()
            return hash((job.weights, first))

        return self._log.run(work, phase="evaluation")

    def _norm(self) -> Any:
        """Work of the script's own on what its passes have left, before the update."""
        job = self._job

        def work() -> int:
            job.point()
            return hash((job.weights, job.gradients))

        return self._log.run(work, phase="norm")


def program_of(dice: random.Random) -> list[list[str]]:
    """Calls of four to eight steps."""
    return [
        [
            *["evaluation"] * dice.randrange(2),
            *["schedule"] * dice.randrange(2),
            *["passes"] * dice.randint(1, 2),
            *["schedule"] * dice.randrange(2),
            *["norm"] * dice.randrange(2),
            *["evaluation"] * dice.randrange(2),
            "update",
            *["schedule"] * dice.randrange(2),
            *["evaluation"] * dice.randrange(2),
        ]
        for _ in range(dice.randint(4, 8))
    ]


def runs(seed: int, **left_out: Any) -> tuple[list[Any], list[Any], int]:
    """Results of a program undisturbed, and interrupted three to eight times; how often it was."""
    dice = random.Random(seed)
    program = program_of(dice)
    keeps = left_out.pop("keeps", True)
    undisturbed = Script(Job(random.Random(seed), interrupts=0)).run(program)
    job = Job(random.Random(seed), interrupts=dice.randint(3, 8), **left_out)
    return undisturbed, Script(job, keeps=keeps).run(program), job.recoveries


def test_a_loop_returns_what_it_would_without_losses() -> None:
    recoveries = 0
    for seed in range(PROGRAMS):
        undisturbed, interrupted, count = runs(seed)
        assert interrupted == undisturbed, seed
        recoveries += count
    assert recoveries > 2 * PROGRAMS


@pytest.mark.parametrize(
    "left_out", [{"without": "position"}, {"without": "setting", "keeps": False}, {"keeps": False}]
)
def test_each_record_that_is_left_out_is_seen(left_out: dict[str, Any]) -> None:
    differing = 0
    for seed in range(PROGRAMS):
        undisturbed, interrupted, _ = runs(seed, **left_out)
        differing += interrupted != undisturbed
    assert differing
