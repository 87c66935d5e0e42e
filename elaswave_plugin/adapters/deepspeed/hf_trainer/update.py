"""One update of a Trainer, which can be made again: its batches, and their training steps."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.adapters.deepspeed.hf_trainer.weighing import Turn, told_of


class Update:
    """The micro-batches of one update, from an iteration of an epoch on."""

    def __init__(
        self,
        job: TrainerJob,
        loader: ElasticLoader,
        *,
        epoch: int,
        first: int,
        count: int,
        collect: Callable[[list[list[Any]]], list[tuple[list[Any], Any]]],
    ) -> None:
        """``collect(rounds)`` gives the Trainer's list of the batches of each, and their items."""
        self._job = job
        self._loader = loader
        self._epoch, self._first, self._count = epoch, first, count
        self._collect = collect
        # The list over which the Trainer iterates: a redo changes what is in it.
        self.batches: list[Any] = []
        self.num_items: Any = None
        # The batches of each round of the step, and the items that their losses are told of.
        self._rounds: list[tuple[list[Any], Any]] = []
        self.losses: list[float] = []
        # The Trainer's own step: (model, inputs, num_items) -> loss.
        self.step: Callable[..., Any] | None = None
        self.model: Any = None
        # (model, batches, num_items) -> the passes of each batch.
        self.weigh: Callable[..., Sequence[Sequence[Turn]]] | None = None

    def read(self) -> None:
        """Read this worker's share of each batch, and count the items of all workers."""
        read = self._job.read(self._loader, epoch=self._epoch, first=self._first, count=self._count)
        device = self._job.engine.device
        self._rounds = self._collect(
            [[send_to_device(one, device) for one in each] for each in read]
        )
        batches, self.num_items = self._rounds[-1]
        held = [_replaced(old, new) for old, new in zip(self.batches, batches, strict=False)]
        self.batches[:] = [*held, *batches[len(held) :]]
        self._rounds[-1] = self.batches, self.num_items

    def train(self) -> None:
        """Call the Trainer's step for each micro-batch; the last one makes the update."""
        assert self.weigh is not None
        self._job.enter_passes()
        boundary = GradientState().sync_gradients
        for round_, (batches, num_items) in enumerate(self._rounds):
            self._job.go(round_)
            weighed = self.weigh(self.model, batches, num_items)
            for number, turns in enumerate(weighed):
                self._job.begin_micro_batch(number)
                is_last = batches is self.batches and number == len(weighed) - 1
                self._pass(turns, is_last=is_last)
        GradientState()._set_sync_gradients(boundary)
        self.losses = self._job.losses

    def _pass(self, turns: Sequence[Turn], *, is_last: bool) -> None:
        """Call the Trainer's step for the passes of a micro-batch, perhaps the last one."""
        assert self.step is not None
        for left, turn in zip(range(len(turns))[::-1], turns, strict=True):
            GradientState()._set_sync_gradients(is_last and not left)
            with (
                self._job.weighing(turn.samples, turn.kinds, turn.weights),
                told_of(self._job.portions.num_averaged),
            ):
                self.step(self.model, turn.batch, turn.num_items)

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of a micro-batch, the mean over all workers."""
        return torch.tensor(self.losses[number], device=self._job.engine.device)


def _replaced(old: Any, new: Any) -> Any:
    """Have the batch that the Trainer holds already be another one, where it can; return it."""
    if isinstance(old, MutableMapping):
        old.clear()
        old.update(new)
    elif isinstance(old, list):
        old[:] = new
    else:
        return new
    return old
