"""A loop that a script counts by its own calls, also in the script of a worker that comes later.

Scripts call their steps, and the work between them, in the same order on every worker. A worker
that comes later enters the job in its first step. From there its script passes over what the others
have behind them, step by step and without meeting anybody, until it is in the step that all the
others stand in.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError, ElasWaveError, EpochChanged
from elaswave_plugin.runtime.framework import StepReport
from elaswave_plugin.runtime.loop import ElasticLoop, GuardedSteps

Result = TypeVar("Result")


class Knowledge(Protocol):
    """What a worker that comes later has to learn, but for the state and for where the loop is."""

    def tell(self) -> Any:
        """What goes to every worker; picklable."""
        ...

    def follow(self, told: Sequence[Any | None]) -> None:
        """Have those learn for whom ``told``, by rank, is None (called on every worker)."""
        ...


class CountedLoop(ElasticLoop):
    """Runs the steps of one worker's script."""

    def __init__(self, steps: GuardedSteps, *, knowledge: Knowledge) -> None:
        super().__init__(steps)
        self._knowledge = knowledge
        self._is_told = not self.worker.alone
        self.is_behind = self.worker.alone
        """Whether the script is at what the others have behind them, where it meets nobody."""
        # Steps that the script has behind it, and those that the others had.
        self._passed = self._reached = 0

    def next_step(self, train_step: Callable[[], StepReport]) -> StepReport | None:
        """Complete the script's next step; None for one that the others have behind them."""
        if self.worker.alone:
            self.worker.ask_to_enter()
            self._recover()
        if self.is_behind and self._passed == self._reached:
            self.is_behind = self.worker.links.alone = False
        report = None
        if self.is_behind:
            self._pass()
        else:
            self._train_step = train_step
            self._run(lambda: None, steps=self._passed + 1)
            report = self._report
        self._passed += 1
        return report

    def _pass(self) -> None:
        """A step is passed over; a recovery has not to wait for the last one of these."""
        while True:
            try:
                return self.worker.phases.enter("passing")
            except EpochChanged:
                pass
            self._recover()

    def run(self, work: Callable[[], Result], *, phase: str, alone: Result) -> Result | None:
        """Run work between steps; ``alone``: what is had of work that the others have behind them.

        Otherwise as in any loop.
        """
        return alone if self.is_behind else super().run(work, phase=phase, alone=alone)

    def finish(self, *, before_leaving: Callable[[], object]) -> None:
        """Leave when everyone has completed its last step.

        Raises ConfigurationError where the script ends earlier than those of the others.
        """
        if self.is_behind:
            raise ConfigurationError(
                f"the script of this worker, which came later, has ended after {self._passed} steps"
                f" of {self._reached} that the others have behind them; begin every worker's script"
                " with the same step, or set respawn to 0"
            )
        super().finish(before_leaving=before_leaving)

    def _recover(self) -> None:
        while True:
            super()._recover()
            try:
                self._tell()
                break
            except EpochChanged:
                pass
        self.worker.links.alone = self.is_behind

    def _tell(self) -> None:
        """Those who have been there tell those who come later (collective over WORLD).

        Workers come between two steps, where everyone is about to complete the same one.
        """
        asks = torch.tensor(int(not self._is_told))
        dist.all_reduce(asks, op=dist.ReduceOp.MAX)
        if not int(asks):
            return
        mine = (self._passed, self._knowledge.tell()) if self._is_told else None
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        told = [one for one in everyone if one is not None]
        if not told:
            raise ElasWaveError(
                "everybody who knew where the script's loop was is lost, before this worker had"
                " come; restart from the last checkpoint"
            )
        self._knowledge.follow([one and one[1] for one in everyone])
        if not self._is_told:
            self._reached, self._is_told = max(passed for passed, _ in told), True
