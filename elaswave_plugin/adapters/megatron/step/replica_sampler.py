"""The sampler of a loader that was given to one replica, as that of each other one."""

from collections.abc import Collection
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from elaswave_plugin.errors import ConfigurationError

# What samplers call the replica that they draw for: torch's, and Megatron-LM's.
_REPLICA = ("rank", "data_parallel_rank")
ADVICE = (
    "give forward_backward iter(loader), or a generator over the loader, of a torch DataLoader with"
    " shuffle=True or False, a DistributedSampler, or a sampler with the attribute"
    " data_parallel_rank"
)


def drawing(batches: Any) -> Any:
    """The sampler that draws the samples of these batches."""
    return batches.sampler if type(batches) is BatchSampler else batches


def replica_name(sampler: Any, *, mine: Collection[int], num_replicas: int) -> str | None:
    """Return the name of the attribute that says for which replica a sampler draws.

    None where all draw alike, or by torch's generator. Raises ConfigurationError for a sampler that
    another worker could not have.
    """
    name = next((one for one in _REPLICA if hasattr(sampler, one)), None)
    if name is None and type(sampler) is SequentialSampler:
        return None
    if type(sampler) is RandomSampler and sampler.generator is None:
        return None
    if name is None or int(getattr(sampler, name)) not in mine:
        wanted = " or ".join(map(str, sorted(mine)))
        seen = "" if name is None else f" whose {name} is {getattr(sampler, name)}, not {wanted}"
        raise ConfigurationError(
            f"the data iterator's loader draws from a {type(sampler).__name__}{seen}, and who runs"
            f" the micro-batches of a lost worker could not draw its samples: {ADVICE}"
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas != num_replicas:
        raise ConfigurationError(
            f"the DistributedSampler's num_replicas is {sampler.num_replicas}, and there are"
            f" {num_replicas} data-parallel replicas: give it their number"
        )
    return name
