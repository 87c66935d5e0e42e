"""The kind of a Trainer's loss, which says how much a worker's share of a step weighs.

``compute_loss`` may divide by the items of all workers or take the mean of its own batch, and may
multiply by the number of processes or not. After a loss of workers each needs another weight, and
nothing tells them apart but their values.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from elaswave_plugin.adapters.deepspeed.compat.patches import asking_patches


class LossKind(NamedTuple):
    """``sums_items``: divided by the items of all; ``times_processes``: multiplied by these."""

    sums_items: bool = False
    times_processes: bool = False

    def weight(self, share: float, *, launched: int, live: int) -> float:
        """Return the weight by which the mean over the workers stays that of the launch.

        ``share``: samples of this worker by the mean of all; ``launched``, ``live``: workers.
        """
        if self.sums_items:
            return 1.0 if self.times_processes else live / launched
        return share * launched / live if self.times_processes else share


@torch.no_grad()
def ask(trainer: Any, model: Any, inputs: Any, num_items: Any) -> LossKind:
    """Compute a loss with twice the items, and with twice the processes (collective over WORLD)."""

    def loss(items: Any) -> float:
        # Some take the labels out of a batch.
        with trainer.compute_loss_context_manager():
            return float(trainer.compute_loss(model, copy.copy(inputs), num_items_in_batch=items))

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        inputs = trainer._prepare_inputs(inputs)
        own = [loss(num_items), loss(2 * num_items)]
        with _twice_the_processes():
            own.append(loss(num_items))
    finally:
        for module, training in modes:
            module.training = training
    # A share without labels has no loss.
    sums = torch.tensor(own, dtype=torch.float64).nan_to_num()
    dist.all_reduce(sums)
    once, items, processes = sums.abs().tolist()
    return LossKind(sums_items=items < 0.75 * once, times_processes=processes > 1.5 * once)


@contextmanager
def _twice_the_processes() -> Iterator[None]:
    shared = [one._shared_state for one in (PartialState, AcceleratorState)]
    before = [one["num_processes"] for one in shared]
    patches = asking_patches()
    patches.apply()
    try:
        for one in shared:
            one["num_processes"] *= 2
        yield
    finally:
        for one, number in zip(shared, before, strict=True):
            one["num_processes"] = number
        patches.undo()
