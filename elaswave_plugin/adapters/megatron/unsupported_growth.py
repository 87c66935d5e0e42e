"""Refuses by name, at once, the jobs of Megatron-Core that cannot grow beyond their launch."""

from elaswave_plugin.adapters.growth import check_reserve
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.layout.reserve import grown_replicas
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
    tp, pp = model_parallel
    if reserve % tp:
        raise ConfigurationError(
            f"--reserve is {reserve}, and workers that join get work once they are a whole tensor "
            f"parallel group of {tp}: use a multiple of {tp}"
        )
    check_reserve(config, reserve, width=width, fewest=2 * tp * pp)
    if config.dataflow == "reroute":
        raise ConfigurationError(
            f"--reserve is {reserve} and dataflow is 'reroute', which gives workers that join "
            "micro-batches of lost replicas only: set dataflow to auto, or leave --reserve out"
        )
    widest = width + grown_replicas(reserve, tp=tp, pp=pp)
    if widest > num_microbatches:
        most = (num_microbatches - width) * tp * pp
        raise ConfigurationError(
            f"{width} replicas and a --reserve of {reserve} workers make stages of up to {widest} "
            f"replicas for {num_microbatches} micro-batches a step; use a --reserve of at most "
            f"{most} or a larger global batch"
        )
