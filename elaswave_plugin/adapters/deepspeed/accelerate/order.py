"""The order of samples of a loader that HF Accelerate has prepared, alike on every worker."""

import base64
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from elaswave_plugin.errors import ConfigurationError

# Of TRL, whose generator is its own, and of `group_by_length`.
_OTHERS = (
    ("trl.trainer.utils", "RepeatSampler"),
    ("transformers.trainer_pt_utils", "LengthGroupedSampler"),
)


class SamplerOrder:
    """The order of a sampler, dealt out as Accelerate's ``BatchSamplerShard`` does.

    An iteration takes the next samples for all workers of the launch, one worker's after the
    other's; the last one is filled up from the front. A random sampler draws an epoch again from
    the state that its generator had then.
    """

    def __init__(
        self, sampler: Any, *, num_samples: int, drop_last: bool, fewest: int | None = None
    ) -> None:
        """``num_samples``: of all workers in an iteration.

        ``fewest``: of the smallest part of it that all workers share; None for itself.
        """
        self._sampler = sampler
        self._num_samples = num_samples
        self._fewest = num_samples if fewest is None else fewest
        whole, rest = divmod(len(sampler), num_samples)
        self._iterations = whole if drop_last else whole + bool(rest)
        self._generator: torch.Generator | None = getattr(sampler, "generator", None)
        # The generator's state before each epoch that was drawn, and one more.
        self._states = [] if self._generator is None else [self._generator.get_state()]
        self._numbers: dict[int, int] = {}
        self._cached: tuple[int, list[int]] | None = None

    @property
    def fewest_samples(self) -> int:
        """Samples of each iteration, of which the last one is filled up, or of its parts."""
        return self._fewest

    def iterations_of(self, epoch: int) -> int:
        """Iterations of any epoch."""
        return self._iterations

    def set_epoch(self, epoch: int, number: int) -> None:
        """Set the number by which Accelerate's seedable sampler draws an epoch of the data."""
        if self._numbers.get(epoch, epoch) != number:
            # A worker that comes later is there before it is told the number.
            self._cached = None
        self._numbers[epoch] = number

    def items(self, epoch: int, iteration: int) -> list[int]:
        """All samples of an iteration, one worker's after the other's."""
        first = iteration * self._num_samples
        return self._order(epoch)[first : first + self._num_samples]

    def _order(self, epoch: int) -> list[int]:
        if self._cached is None or self._cached[0] != epoch:
            while self._generator is not None and len(self._states) <= epoch:
                self._draw(len(self._states) - 1)
            drawn = self._draw(epoch)
            self._cached = epoch, list(islice(cycle(drawn), self._iterations * self._num_samples))
        return self._cached[1]

    def _draw(self, epoch: int) -> list[int]:
        if self._generator is not None:
            self._generator.set_state(self._states[epoch])
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._numbers.get(epoch, epoch))
        drawn = list(self._sampler)
        if self._generator is not None and len(self._states) == epoch + 1:
            self._states.append(self._generator.get_state())
        return drawn


def unskipped(batches: Any) -> tuple[Any, int]:
    """Return a batch sampler as it was before `skip_first_batches`, and the batches left out."""
    count = 0
    while isinstance(batches, SkipBatchSampler):
        count += batches.skip_batches
        batches = batches.batch_sampler
    return batches, count


def sampler_of(loader: Any, num_processes: int) -> tuple[Any, int, bool]:
    """Sampler, batch size of a worker, and whether the rest is dropped, of a prepared loader.

    Batches that `skip_first_batches` leaves out are among them.
    Raises ConfigurationError where its order could not be drawn again.
    """
    batches, _ = unskipped(loader.batch_sampler)
    if isinstance(batches, BatchSamplerShard):
        if batches.split_batches:
            raise ConfigurationError(
                "split_batches is True in Accelerate, and a batch cannot be split evenly after a "
                "loss; set it to False and divide the loader's batch_size by the processes"
            )
        if not batches.even_batches and not batches.drop_last:
            raise ConfigurationError(
                "even_batches is False in Accelerate, so that workers would make different numbers "
                "of steps; set it to True, or drop_last=True in the loader"
            )
        batches = batches.batch_sampler
    elif num_processes > 1:
        raise ConfigurationError(
            f"the training loader has a {type(batches).__name__}, wanted one that "
            "accelerator.prepare() has dealt out to the processes"
        )
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not (
        isinstance(sampler, RandomSampler | SequentialSampler)
        or (type(sampler).__module__, type(sampler).__name__) in _OTHERS
    ):
        raise ConfigurationError(
            f"the training loader draws from a {type(sampler or batches).__name__}, wanted a "
            "RandomSampler or SequentialSampler (shuffle=True or False): the worker that redoes a "
            "step has to draw its samples again"
        )
    return sampler, int(batches.batch_size), bool(batches.drop_last)


def agree_on(sampler: Any, told: str | None = None) -> str:
    """Have every worker draw what the first one draws; return that, for one that comes later.

    ``told``: what it was when the job began; None asks the others, which are all there.
    """
    if getattr(sampler, "generator", sampler) is None:
        sampler.generator = torch.Generator().manual_seed(torch.initial_seed())
    if getattr(sampler, "generator", None) is None:
        return ""
    seed = torch.tensor([getattr(sampler, "initial_seed", 0)])
    state = sampler.generator.get_state()
    if told is None:
        dist.broadcast(seed, src=0)
        dist.broadcast(state, src=0)
    else:
        number, _, encoded = told.partition(" ")
        seed, state = torch.tensor([int(number)]), torch.tensor([*base64.b64decode(encoded)]).byte()
    sampler.generator.set_state(state)
    if hasattr(sampler, "initial_seed"):
        sampler.initial_seed = int(seed)
    return f"{int(seed)} {base64.b64encode(bytes(state.tolist())).decode()}"
