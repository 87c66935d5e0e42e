"""One worker's portion of each iteration: in fast mode a share of the samples of all workers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from elaswave_plugin.core.step.dataflow import Shares, share
from elaswave_plugin.core.step.loss_parts import Interval
from elaswave_plugin.recovery.place import Deal
from elaswave_plugin.recovery.worker import Worker


class Portions:
    """The portions of one worker; a step has a single round."""

    keeps_micro_batches = False
    """Whether micro-batches stay those of the launch."""
    why_buffers_stay: str | None = None
    """Why passes may change no buffer; None where they may."""

    def __init__(self, worker: Worker, *, width: int, num_samples: int) -> None:
        """``width``: replicas of the launch; ``num_samples``: of a whole iteration."""
        self._worker = worker
        self._width = width
        self._num_samples = num_samples
        slots = worker.launch_slots
        self._launch_shares = lru_cache(partial(share, launch_slots=slots, live=slots))
        self.number = self.before = 0
        """The present round, and the batches that those before it had."""

    @property
    def deal(self) -> Deal:
        """Return the function that deals the work of a view."""
        return partial(share, num_samples=self._num_samples)

    # ---- samples --------------------------------------------------------------------------------

    def launch_intervals(self, num_samples: int) -> list[Interval]:
        """Return the places of the micro-batches of the launch among samples of all."""
        shares = self._launch_shares(num_samples=num_samples)
        return [(start, stop) for _, start, stop in shares.intervals]

    def interval(self, num_samples: int) -> Interval:
        """Return the place of this worker's portion among samples of all."""
        return self._shares(num_samples).interval(self._worker.slot)

    def every(self, num_samples: int) -> list[Interval]:
        """Return the places of the portions of all workers, in the order of samples."""
        return [(start, stop) for _, start, stop in self._shares(num_samples).intervals]

    def weight(self, num_samples: int) -> float:
        """Return the weight of a mean over the portion, where workers are averaged."""
        return self._shares(num_samples).weight(self._worker.slot)

    @property
    def has_launch_shares(self) -> bool:
        """True if each of as many workers as at the launch has as many samples as then."""
        intervals = self.every(self._num_samples)
        sizes = {stop - start for start, stop in intervals}
        return len(intervals) == self._width and len(sizes) == 1

    def _shares(self, num_samples: int) -> Shares:
        worker, shares = self._worker, self._worker.dataflow
        assert isinstance(shares, Shares)
        if num_samples == shares.num_samples:
            return shares
        return share(num_samples=num_samples, **worker.placement.dealt_over)

    @property
    def is_void(self) -> bool:
        """True if this worker has nothing to compute in the present round."""
        return False

    @property
    def is_last(self) -> bool:
        """True if the present round completes the step."""
        return True

    # ---- a step ---------------------------------------------------------------------------------

    def each(self) -> range:
        """The numbers of the rounds of a step."""
        return range(1)

    def begin(self, iteration: int) -> int:
        """A batch is served, behind others of the step; returns its number in the round."""
        return iteration

    def go(self, number: int, *, batches: int, losses: Sequence[torch.Tensor]) -> None:
        """Be in a round, behind ``batches`` of the step; ``losses`` of the one before."""

    def select(self, part: int) -> None:
        """Passes of a micro-batch of this round follow."""

    @property
    def known(self) -> Sequence[torch.Tensor] | None:
        """The losses of a micro-batch that is not computed here; None of one that is."""
        return None

    @contextmanager
    def passing(self, loss: torch.Tensor) -> Iterator[None]:
        """A backward pass in this block."""
        yield

    def reduce(self) -> None:
        """Have gradients averaged where they are due behind a micro-batch, if DeepSpeed has not."""

    def interrupted(self) -> None:
        """A recovery begins."""

    # ---- numbers of all workers -----------------------------------------------------------------

    @property
    def num_averaged(self) -> int:
        """The number of portions that an average is over."""
        return dist.get_world_size()

    def losses(self, last: Sequence[torch.Tensor]) -> list[float] | None:
        """Return the loss of each micro-batch, the mean over all replicas, where they are whole.

        ``last``: those of this round.
        """
        return None

    def mean(self, value: torch.Tensor, *, weight: float, is_behind: bool) -> torch.Tensor:
        """The mean over the samples of all (collective over WORLD).

        ``is_behind``: whether the backward pass of the micro-batch has been made.
        """
        total = value * weight
        dist.all_reduce(total)
        return total / dist.get_world_size()
