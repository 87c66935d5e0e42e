"""Which jobs may grow beyond their launch; the others are refused by name before they begin."""

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError


def check_growth(
    config: ElasticConfig,
    reserve: int,
    *,
    width: int,
    model_parallel: tuple[int, int],
    num_microbatches: int,
) -> None:
    """Raise ConfigurationError for a job that cannot have ``reserve`` workers more.

    ``width``: the data-parallel width at launch; ``model_parallel``: the sizes of tp and pp.
    """
    if not reserve:
        return
    if model_parallel != (1, 1):
        tp, pp = model_parallel
        raise ConfigurationError(
            f"--reserve is {reserve}, and a job with tensor parallel size {tp} and pipeline "
            f"parallel size {pp} cannot grow beyond its launch, only data-parallel ones can: leave "
            "--reserve out"
        )
    if width == 1:
        raise ConfigurationError(
            f"--reserve is {reserve}, and a job launched with 1 worker cannot grow, since its "
            "groups of all workers and of one are alike: launch at least 2"
        )
    if not config.snapshots:
        raise ConfigurationError(
            f"--reserve is {reserve} and snapshots are off, from which a worker that joins gets "
            "its state: turn snapshots on, or leave --reserve out"
        )
    if width + reserve > num_microbatches:
        raise ConfigurationError(
            f"{width} workers and a --reserve of {reserve} make {width + reserve} workers for "
            f"{num_microbatches} micro-batches a step; use a --reserve of at most "
            f"{num_microbatches - width} or a larger global batch"
        )
