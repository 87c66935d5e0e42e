"""Says once, when it begins to matter, what a loss changes for lines of a script's own loop."""

from elaswave_plugin.core.step.dataflow import Shares
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker

_PAGE = "docs/deepspeed.md"


class OwnLoops:
    """One worker's warnings of a loop that the script owns; rank 0 speaks for all."""

    def __init__(self, worker: Worker, *, width: int) -> None:
        """``width``: the workers of the launch."""
        self._worker = worker
        self._width = width
        self._evaluation_told = self._shares_told = False

    def evaluates(self) -> None:
        """Warn of a pass of an evaluation that is not work of `run`, where workers are missing."""
        left = len(self._worker.view.ranks)
        if self._evaluation_told or not self._worker.owns_rank_0 or left >= self._width:
            return
        self._evaluation_told = True
        say(
            f"the script evaluates by itself with {left} of {self._width} workers: the samples of a"
            " lost worker's shard are in no result, unless the loader was made after the loss;"
            " write elaswave_plugin.deepspeed.run(engine, evaluate) and make the loader in evaluate"
            f" ({_PAGE})"
        )

    def loaded(self, *, steps: int, samples: int, batch: int) -> None:
        """Warn where the steps of a checkpoint had another batch than those that follow."""
        if not self._worker.owns_rank_0 or samples == steps * batch:
            return
        say(
            f"the checkpoint has {steps} steps of {samples / steps:g} samples, and a step has"
            f" {batch} from now on: a job of another number of workers keeps its batch where"
            " train_batch_size is set in the configuration"
        )

    def recovered(self) -> None:
        """Warn where workers have unequal shares of an iteration from now on."""
        shares = self._worker.dataflow
        if self._shares_told or not self._worker.owns_rank_0 or not isinstance(shares, Shares):
            return
        sizes = {stop - start for _, start, stop in shares.intervals}
        if len(sizes) == 1:
            return
        self._shares_told = True
        say(
            f"workers have {min(sizes)} or {max(sizes)} samples of an iteration from now on: the"
            " gradients are weighted by them, and a mean over the workers that the script takes of"
            f" its losses has to be as well ({_PAGE})"
        )

    def leaves_first_epoch(self, taken: int, void: int) -> None:
        """Warn where a script leaves its first epoch of the data after void batches."""
        if self._worker.owns_rank_0:
            say(
                f"the script leaves its first epoch of the data after {taken} batches, of which a"
                f" loss had made {void} void: if it counts them, it skips their samples; leave an"
                f" epoch by engine.global_steps ({_PAGE})"
            )
