"""Keys a dataset's draws by seed, step and sample, alike for every reader and every reading.

Keyed are the generators of torch, NumPy and Python, which are put back after the reading, and those
that the dataset has of its own (as ``GPTFIMDataset.np_rng``), which no other code draws from.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from elaswave_plugin.adapters.host_draws import undone_numbers
from elaswave_plugin.adapters.megatron.compat.rng import seed_generators
from elaswave_plugin.core.step.rng import draw_key

_DEEPEST = 8


class SampleDraws:
    """Reads samples of one dataset."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._own = tuple(own_generators(dataset))

    def read(self, ids: Sequence[int], moment: int) -> list[Any]:
        """The samples ``ids``, of which others were drawn at another ``moment``."""
        with undone_numbers():
            return [self._sample(one, moment) for one in ids]

    def _sample(self, number: int, moment: int) -> Any:
        seed_generators(draw_key(self._seed, moment, number))
        for place, reseed in enumerate(self._own):
            reseed(draw_key(self._seed, moment, number, place))
        return self._dataset[number]


def own_generators(dataset: Any) -> Iterator[Callable[[int], object]]:
    """Yield a function to seed each generator that a dataset's attributes reach."""
    seen: set[int] = set()
    level: list[Any] = [dataset]
    for _ in range(_DEEPEST):
        deeper: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            reseed = _seeding(value)
            if reseed is not None:
                yield reseed
            else:
                deeper += _parts(value)
        level = deeper


def _seeding(value: Any) -> Callable[[int], object] | None:
    if isinstance(value, np.random.RandomState):
        return lambda key: value.seed(key & 0xFFFFFFFF)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return lambda key: setattr(bits, "state", type(bits)(key).state)
    if isinstance(value, random.Random):
        return value.seed
    return value.manual_seed if isinstance(value, torch.Generator) else None


def _parts(value: Any) -> list[Any]:
    """List the values of an indexed object or a small container, in which datasets keep others."""
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= 64 else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= 64 else []
    is_dataset = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | torch.Tensor)
    return list(getattr(value, "__dict__", {}).values()) if is_dataset else []
