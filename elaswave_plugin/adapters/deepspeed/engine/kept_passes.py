"""The gradient sums of passes that a loss has not taken, from which the redo of a step goes on.

Each worker decides by itself whether it does: batches, draws and the order of sums stay the same.
"""

from collections.abc import Mapping

import torch

from elaswave_plugin.adapters.deepspeed.zero.replica_sums import Gradients, ReplicaSums
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.recovery.worker import Worker


class KeptPasses:
    """The sums that one worker keeps of an interrupted step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.sums: dict[int, Gradients] = {}
        """By replica of the launch."""
        # The losses of their micro-batches, and the step that they are of.
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._step = -1
        # That of the attempt that runs, None without one.
        self._began: int | None = None

    def begin(self) -> None:
        """An attempt at a step begins."""
        self.sums, self._losses = {}, {}
        self._began = self._worker.completed

    def keep(self, sums: ReplicaSums, losses: Mapping[int, list[torch.Tensor]]) -> None:
        """Keep the sums of complete passes, by the ``losses`` of their replicas' micro-batches."""
        if self._began is None:
            return
        taken = sums.take()
        self.sums = {one: taken[one] for one in losses if one in taken}
        self._losses = {one: losses[one] for one in self.sums}
        self._step, self._began = self._began, None

    def taken_up(self, flow: Dataflow) -> dict[int, list[torch.Tensor]]:
        """Return the losses by replica of what the redo of a step goes on from here, and tell it.

        Those that just came compare their first losses with all others'.
        """
        worker = self._worker
        if self._step != worker.completed or not self.sums:
            return {}
        mine = flow.microbatches(worker.slot) if not worker.untried else ()
        found = {one: self._losses[one] for one in mine if one in self.sums}
        worker.events.emit(
            "sums_kept",
            slot=worker.slot,
            step=worker.completed,
            epoch=worker.view.epoch,
            microbatches=sorted(
                number * flow.num_replicas + one
                for one, losses in found.items()
                for number in range(len(losses))
            ),
        )
        return found
