"""Refuses by name the jobs that cannot grow beyond their launch, alike for all frameworks."""

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say


def without_newcomers(
    settings: ElasticConfig, reserve: int, why: str, *, rank: int
) -> ElasticConfig:
    """Return the settings of a job that no worker can join later, so that lost ones stay away.

    The first worker says so at the start. Raises ConfigurationError, with the reason ``why``, where
    the user asks for more.
    """
    if reserve:
        raise ConfigurationError(f"--reserve is {reserve}, and {why}; leave --reserve out")
    without = settings.without_respawn(why)
    if settings.respawn and not rank:
        say(f"a worker that is lost stays away, and the others do its work: {why}")
    return without


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
