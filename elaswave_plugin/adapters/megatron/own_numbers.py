"""Names the lines of a script whose own numbers follow what each worker runs, after a loss."""

from collections.abc import Callable, Iterator
from typing import Any

from elaswave_plugin.adapters.megatron.step.reported_losses import Reports
from elaswave_plugin.adapters.script_lines import asking_line
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker

_PAGE = "docs/megatron_core.md"


class OwnNumbers:
    """One worker's warnings of numbers that a script makes by itself; each line is told once."""

    def __init__(self, worker: Worker, *, share: int, concerns: Callable[[], bool]) -> None:
        """``share``: micro-batches of a replica at the launch.

        ``concerns()``: whether the script is in a step, an evaluation, or between two of them.
        """
        self._worker = worker
        self._share = share
        self._concerns = concerns
        self._told: set[str] = set()

    def begin(self) -> None:
        """A step begins: look from now on at what the script asks for, if shares are others."""
        self._worker.links.asked = None if self._flow.is_healthy else self.asks

    def end(self) -> None:
        """Look at nothing any more."""
        self._worker.links.asked = None

    def given(self, losses: list[Any]) -> list[Any]:
        """The losses that a call returns to the script, which tells where it reads them itself."""
        return losses if self._worker.links.asked is None else Reports(losses, self.asks)

    def asks(self, call: str | None = None) -> None:
        """Name the line that asks for a width, for what all workers have, or reads losses."""
        line = asking_line(call) if self._concerns() else None
        if line is None or line in self._told:
            return
        self._told.add(line)
        # A script prints on the first rank or the last one, and all workers would say the same.
        if self._worker.slot not in (self._worker.ranks[0], self._worker.ranks[-1]):
            return
        sizes = " or ".join(map(str, sorted(set(self._sizes()))))
        say(
            f"{line} may show the loss: workers run {sizes} micro-batches of a batch now "
            f"({self._share} each at the launch), so that a mean over them, or a count by a width, "
            "is another number; show report.loss and what job.evaluate returns, and count "
            f"args.global_batch_size samples a step ({_PAGE})"
        )

    @property
    def _flow(self) -> Dataflow | PipelineFlow:
        flow = self._worker.dataflow
        assert isinstance(flow, Dataflow | PipelineFlow)
        return flow

    def _sizes(self) -> Iterator[int]:
        """Yield how many micro-batches each worker runs that has a place."""
        flow = self._flow
        for slot in self._worker.ranks:
            if isinstance(flow, Dataflow):
                yield len(flow.microbatches(slot))
            elif flow.coordinate(slot) is not None:
                yield len(flow.samples(slot))
