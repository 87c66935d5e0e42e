"""Names the lines of a script whose own numbers follow what each worker runs, after a loss."""

from collections.abc import Callable, Iterator
from typing import Any

from elaswave_plugin.adapters.megatron.step.reported_losses import Reports
from elaswave_plugin.adapters.script_lines import asking_line
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered


class OwnNumbers:
    """One worker's warnings of numbers that a script makes by itself; each line is told once."""

    def __init__(
        self,
        worker: Worker,
        *,
        flow: Callable[[], Dataflow | PipelineFlow],
        share: int,
        advice: str,
        concerns: Callable[[], bool] = lambda: True,
    ) -> None:
        """``flow()``: what each worker runs now; ``share``: micro-batches of a replica at launch.

        ``advice``: what to do, and a page; ``concerns()``: whether the script is in a step, an
        evaluation, or between two of them.
        """
        self._worker, self._flow, self._share = worker, flow, share
        self._advice, self._concerns = advice, concerns
        # Lines that were found here, by what first, and which of all workers' were told.
        self._lines: dict[str, str] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """A step begins: look from now on at what the script asks for, if shares are others."""
        self._worker.links.asked = None if self._flow().is_healthy else self.asks

    def end(self) -> None:
        """Look at nothing any more."""
        self._worker.links.asked = None

    def given(self, losses: list[Any]) -> list[Any]:
        """The losses that a call returns to the script, which tells where it reads them itself."""
        return losses if self._worker.links.asked is None else Reports(losses, self.asks)

    def asks(self, call: str | None = None) -> None:
        """Note the line that asks for a width, for what all workers have, or reads losses."""
        line = asking_line(call) if self._concerns() else None
        if line is not None:
            self._lines.setdefault(line.partition(" ")[0], line)

    @property
    def new(self) -> list[str]:
        """The lines that were found here and are not told."""
        return [line for line in self._lines.values() if line not in self._told]

    def tell(self) -> None:
        """Name all workers' new lines in one sentence (collective over WORLD, after a loss)."""
        if self._flow().is_healthy:
            return
        lines = sorted({line for lines in gathered(self.new) for line in lines} - self._told)
        self._told.update(lines)
        if not lines or not self._worker.owns_rank_0:
            return
        sizes = " or ".join(map(str, sorted(set(self._sizes()))))
        say(
            f"{', '.join(lines)} may show the loss: workers run {sizes} micro-batches of a batch "
            f"now ({self._share} each at the launch), so that a mean over them, or a count by a "
            f"width, is another number; {self._advice}"
        )

    def _sizes(self) -> Iterator[int]:
        """Yield how many micro-batches each worker runs that has a place."""
        flow = self._flow()
        for slot in self._worker.ranks:
            if isinstance(flow, Dataflow):
                yield len(flow.microbatches(slot))
            elif flow.coordinate(slot) is not None:
                yield len(flow.samples(slot))
