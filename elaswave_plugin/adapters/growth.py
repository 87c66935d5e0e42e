"""Refuses by name the jobs that cannot grow beyond their launch, alike for all frameworks."""

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError


def check_reserve(config: ElasticConfig, reserve: int, *, width: int, fewest: int) -> None:
    """Raise ConfigurationError for a job to which ``reserve`` workers cannot be let in.

    ``width``: the data-parallel width at launch; ``fewest``: workers with which it would be 2.
    """
    if not reserve:
        return
    if width == 1:
        raise ConfigurationError(
            f"--reserve is {reserve}, and a job launched with data parallel size 1 cannot grow, "
            "since its groups of all replicas and of one are alike: launch at least "
            f"{fewest} workers"
        )
    if not config.snapshots:
        raise ConfigurationError(
            f"--reserve is {reserve} and snapshots are off, from which a worker that joins gets "
            "its state: turn snapshots on, or leave --reserve out"
        )
