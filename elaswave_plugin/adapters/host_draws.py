"""The generators of torch on the host, NumPy and Python: seeded by a key, and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_host(key: int) -> None:
    """Have all of them draw by a key."""
    torch.default_generator.manual_seed(key)
    # NumPy takes 32 bits.
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def host_states() -> tuple[Any, ...]:
    """Return the states of all of them."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_host(states: tuple[Any, ...]) -> None:
    """Have all of them go on from states that they had."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def undone_draws() -> Iterator[None]:
    """Put back those of the host and of the accelerator, so that the same numbers come again."""
    with torch.random.fork_rng(), undone_numbers():
        yield


@contextmanager
def undone_numbers() -> Iterator[None]:
    """Put all of them back after the draws inside."""
    states = host_states()
    try:
        yield
    finally:
        set_host(states)
