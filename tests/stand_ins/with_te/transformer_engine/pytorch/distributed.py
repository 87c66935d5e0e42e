"""Stands in for transformer_engine.pytorch.distributed: the RNG tracker, what is cached of groups.

As on a GPU, the tracker keeps generators, and a stream that is entered is the kept generator
itself: what is drawn in it is drawn from that. A CPU's generators cannot be shared so, hence states
are copied on the way in and out.
"""

from contextlib import contextmanager, nullcontext
from functools import lru_cache

import torch


@lru_cache
def get_distributed_world_size(group=None):
    """The size of a group, asked once for all."""
    return torch.distributed.get_world_size(group)


@lru_cache
def get_distributed_rank(group=None):
    """The rank in a group, asked once for all."""
    return torch.distributed.get_rank(group)


def activation_recompute_forward(**kwargs):
    """Of fp8, which is off."""
    return nullcontext()


class CudaRNGStatesTracker:
    """Generators by name."""

    def __init__(self):
        self.states_ = {}
        self.seeds_ = set()

    def reset(self):
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self):
        """Return what is kept, in a dictionary of its own."""
        return dict(self.states_)

    def set_states(self, states):
        """Keep these from now on."""
        self.states_ = states

    def add(self, name, seed):
        """Keep another generator."""
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"seed {seed} or name {name} is there already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed)

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        """Draw from the one of this name inside."""
        inside, outside = self.states_[name], torch.get_rng_state()
        torch.set_rng_state(inside.get_state())
        try:
            yield
        finally:
            inside.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)
