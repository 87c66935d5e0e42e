"""A loop that a script counts by its own calls, also in the script of a worker that comes later.

Scripts call their steps, and the work between them, in the same order on every worker. A worker
that comes later enters the job in its first step. From there its script passes over what the others
have behind them, step by step and without meeting them, until it is in the step that all the
others stand in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import ElasticLoop, GuardedSteps
from elaswave_plugin.recovery.guarded import guarded
from elaswave_plugin.recovery.handshake import Handshake

Result = TypeVar("Result")


class Knowledge(Protocol):
    """The knowledge that a later worker needs, except the state and the loop's position."""

    def tell(self) -> Any:
        """Return what goes to every worker; a plain value."""
        ...

    def follow(self, states: Sequence[Any | None]) -> None:
        """Teach the workers whose ``states``, by rank, is None (called on every worker)."""
        ...


class CountedLoop(ElasticLoop):
    """Runs the steps of one worker's script."""

    def __init__(self, steps: GuardedSteps, *, knowledge: Knowledge) -> None:
        super().__init__(steps)
        self._knowledge = knowledge
        self.is_lagging = self.worker.detached
        """Whether the script is at what the others have behind them, where it meets nobody."""
        # Steps that the script has behind it, and those that the others had.
        self._passed = self._reached = 0
        knows = not self.worker.detached
        self._handshake = Handshake(
            self.worker.notes, knows=knows, tell=self._tell, follow=self._follow
        )

    def next_step(self, train_step: Callable[[], StepReport]) -> StepReport | None:
        """Complete the script's next step; None for one that the others have behind them."""
        if self.worker.detached:
            self.worker.ask_to_enter()
            self._recover()
        if self.is_lagging and self._passed == self._reached:
            self.is_lagging = self.worker.links.detached = False
        report = None
        if self.is_lagging:
            self._pass()
        else:
            self._train_step = train_step
            self._run(lambda: None, steps=self._passed + 1)
            report = self._report
        self._passed += 1
        return report

    def _pass(self) -> None:
        """A step is passed over; a recovery has not to wait for the last one of these."""
        guarded(partial(self.worker.phases.enter, "passing"), self._recover)

    def run(self, work: Callable[[], Result], *, phase: str, detached: Result) -> Result | None:
        """Run work between steps; ``detached``: the result of work that the others have done.

        Otherwise as in any loop.
        """
        return detached if self.is_lagging else super().run(work, phase=phase, detached=detached)

    def finish(self, *, before_leaving: Callable[[], object]) -> None:
        """Leave when all workers have completed their last step.

        Raises ConfigurationError where the script ends earlier than those of the others.
        """
        if self.is_lagging:
            raise ConfigurationError(
                f"the script of this worker, which came later, has ended after {self._passed} steps"
                f" of {self._reached} that the others have behind them; begin every worker's script"
                " with the same step, or set respawn to 0"
            )
        super().finish(before_leaving=before_leaving)

    def _recover(self) -> None:
        super()._recover()
        guarded(self._handshake.exchange, super()._recover)
        self.worker.links.detached = self.is_lagging

    def _tell(self) -> tuple[int, Any]:
        return self._passed, self._knowledge.tell()

    def _follow(self, states: Sequence[Any]) -> None:
        self._knowledge.follow([one and one[1] for one in states])
        if states[dist.get_rank()] is None:
            self._reached = max(one[0] for one in states if one is not None)
