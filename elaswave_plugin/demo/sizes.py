"""The layout of the demo's workers: tp, pp and dp checked, and a model whose layers divide."""

from collections.abc import Sequence

from elaswave_plugin.config import Kill
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout, sizes_of
from elaswave_plugin.errors import ConfigurationError

GLOBAL_BATCH = 8
MICRO_BATCH = 1
SEQUENCE_LENGTH = 128
ATTENTION_HEADS = 4
LEAST_LAYERS, MOST_LAYERS = 4, 8
DEFAULT_NPROC, DEFAULT_HYBRID_DP = 4, 2


def check_sizes(
    *, nproc: int | None, tp: int | None, pp: int | None, dp: int | None
) -> ParallelLayout:
    """The layout at launch; None is a size that the user left open.

    Raises ConfigurationError with one sentence at the first size that does not fit.
    """
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp)):
        if size is not None and size < 1:
            raise ConfigurationError(f"{name} is {size}, wanted 1 or more")
    tp, pp = tp or 1, pp or 1
    if ATTENTION_HEADS % tp:
        raise ConfigurationError(
            f"tp is {tp}, wanted a divisor of the {ATTENTION_HEADS} attention heads of the demo's"
            " model: 1, 2 or 4"
        )
    if pp > MOST_LAYERS:
        raise ConfigurationError(
            f"pp is {pp}, wanted at most {MOST_LAYERS}: the demo's model has at most"
            f" {MOST_LAYERS} layers, and every stage needs one"
        )
    width_name = "nproc" if dp is None and tp * pp == 1 else "dp"
    width = _width(nproc, tp=tp, pp=pp, dp=dp)
    _check_width(width_name, width)
    # The smallest model that is not smaller than the usual one.
    num_layers = pp * -(-LEAST_LAYERS // pp)
    return launch_layout(tp=tp, pp=pp, dp=width, num_layers=num_layers)


def check_kills_leave_whole_groups(kills: Sequence[Kill], layout: ParallelLayout) -> None:
    """Raise ConfigurationError if a stage would be left without a whole TP group."""
    left = layout.without([kill.slot for kill in kills]).reformed_in_place()
    for stage, width in enumerate(left.widths):
        if not width:
            raise ConfigurationError(
                f"kills {', '.join(map(str, kills))} leave stage {stage} without a whole TP group"
                f" of {layout.tp}, wanted one in each of {len(layout.stages)} stages; kill fewer"
            )


def _width(nproc: int | None, *, tp: int, pp: int, dp: int | None) -> int:
    """The replicas of each stage, from whichever of ``nproc`` and ``dp`` is given."""
    if dp is not None:
        wanted = tp * pp * dp
        if nproc is not None and nproc != wanted:
            raise ConfigurationError(
                f"nproc is {nproc}, wanted {wanted}, which is tp {tp} x pp {pp} x dp {dp}; leave"
                " one of them out"
            )
        return dp
    if tp * pp == 1:
        return DEFAULT_NPROC if nproc is None else nproc
    return DEFAULT_HYBRID_DP if nproc is None else sizes_of(nproc, tp=tp, pp=pp)


def _check_width(name: str, width: int) -> None:
    micro_batches = GLOBAL_BATCH // MICRO_BATCH
    if width < 2:
        raise ConfigurationError(
            f"{name} is {width}, wanted at least 2: one is killed, one goes on"
        )
    if width > micro_batches:
        raise ConfigurationError(
            f"{name} is {width}, wanted at most {micro_batches}: a step has {micro_batches}"
            " micro-batches and every worker needs one"
        )
    if micro_batches % width:
        raise ConfigurationError(
            f"{name} is {width}, wanted a divisor of {micro_batches}: the micro-batches of a step"
            " are dealt out evenly at launch"
        )
