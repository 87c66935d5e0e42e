"""The calls that a training script makes of the plugin, with the plugin on and off."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport

Result = TypeVar("Result")
ForwardBackward = Callable[..., list[Any]]
# One a micro-batch: (sum, tokens), a tensor of the two, one mean, or a dict with one of these.
Losses = Sequence[Any]
# The norm is None where a loss scaler skipped the step.
TrainStep = Callable[[], tuple[Losses, float | None]]


class Job(Protocol):
    """The plugin's side of a training script, with the plugin on or off."""

    @property
    def iteration(self) -> int:
        """The step that is made now, from 0 on; between two steps, the one that comes next.

        What a step does by its number asks this: a worker that comes later has run no earlier one.
        """

    def process_group(self) -> dict[str, Any]:
        """Arguments of ``torch.distributed.init_process_group``, which has not been called yet."""

    def bind(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        *,
        train_iters: int,
        start_step: int = 0,
        consumed_samples: int | None = None,
    ) -> None:
        """Take a model with its optimizer and scheduler into care, before the first other verb.

        What is loaded before that verb is part of it. Called once for each model that the job
        trains, with the same run in every call. ``start_step``: the steps that a run which is
        resumed has behind it; ``consumed_samples``: what it has read in them, a multiple of the
        global batch, by default one batch a step.
        """

    def batches(self, dataset: Any) -> Iterator[Any]:
        """The data iterator over a map-style dataset with sequential sampling, or a DataLoader.

        A loader's workers are not used; shuffled, it has the order of a DistributedSampler's.
        """

    def forward_backward(self, function: ForwardBackward) -> ForwardBackward:
        """Megatron-Core's forward-backward function, for whatever this worker runs now.

        Called by the functions of ``train``, ``evaluate`` and ``run`` only. ``num_microbatches``
        may be left out; else it is that of one replica, as in Megatron-LM. Only in ``train`` may
        ``forward_only`` be False, and then of a model that is bound. Neither ``forward_step`` nor
        its loss function calls a collective between replicas.
        """

    def train(
        self, train_step: TrainStep, *, last_checkpoint: Callable[[], object] | None = None
    ) -> Iterator[tuple[int, StepReport]]:
        """Run the training steps; the job goes on until the script ends, as for a save after them.

        ``last_checkpoint()`` is called where every worker is told to leave, and the last thing.

        ``train_step()`` calls the wrapped ``forward_backward``, each time for the next batch of
        the iterator that it is given, and may call it with ``forward_only=True`` as well. It
        returns the losses that a call reported, in any form of ``Losses``, and the gradient norm:
        None, reported as 0, where a loss scaler skipped the step.
        """

    def finish(self) -> None:
        """Leave with the others now: for loops that end before the last step."""

    def evaluate(self, evaluate: Callable[[], Sequence[Losses]]) -> float:
        """Mean loss over global batches; ``evaluate()`` returns the losses of each."""

    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Run other work between steps, which every worker calls; ``phase`` names it: "save".

        Before training "load" is work that loads a checkpoint. None for a worker that comes later
        and is not in the job yet: it has no part in it, and no need to load.
        """

    def name_newest(self, tracker: str | Path, text: object) -> None:
        """Have the small file ``tracker`` name the newest checkpoint, by ``text``.

        Every worker calls it in the ``save`` of ``run``, when the checkpoint is written. The file
        changes in one step, and never by a worker that the others have given up.
        """


def num_microbatches_of(*, global_batch_size: int, micro_batch_size: int, width: int) -> int:
    """Micro-batches of a step; raises ConfigurationError unless they divide evenly."""
    if global_batch_size % micro_batch_size:
        raise ConfigurationError(
            f"global batch size {global_batch_size} is not a multiple of the micro-batch size "
            f"{micro_batch_size}; change one of them"
        )
    count = global_batch_size // micro_batch_size
    if width > count:
        raise ConfigurationError(
            f"{width} workers for {count} micro-batches a step; use at most {count} workers or a "
            "larger global batch"
        )
    if count % width:
        raise ConfigurationError(
            f"{count} micro-batches a step cannot be dealt evenly to {width} workers at launch; "
            f"make the global batch a multiple of {width * micro_batch_size}"
        )
    return count
