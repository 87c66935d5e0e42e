"""The script's arguments that ``attach`` reads, checked by name."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import check_words, given_as

_BATCHES = ("global_batch_size", "micro_batch_size")
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Samples of a step and of a micro-batch, sizes of tp and pp, and the seed of all draws."""

    global_batch_size: int
    micro_batch_size: int
    model_parallel: tuple[int, int]
    seed: int


def take_sizes(args: Any, sizes: Mapping[str, Any]) -> None:
    """Put the numbers that ``attach`` got by name among the arguments.

    Raises ConfigurationError for a name that is none of them, and for one that the arguments have
    with another value.
    """
    settings = {key: given_as(key) for key in ElasticConfig.model_fields}
    check_words(sizes, (*_BATCHES, "seed", *_PARALLEL), "attach: unknown name", elsewhere=settings)
    for name, value in sizes.items():
        seen = getattr(args, name, value)
        if seen != value:
            raise ConfigurationError(
                f"attach got {name}={value!r}, and the arguments have {name} {seen!r}: give one of"
                " them"
            )
        setattr(args, name, value)


def read_sizes(args: Any) -> Sizes:
    """Read them as Megatron-LM's arguments name them; the parallel sizes are 1 where absent.

    Raises ConfigurationError for arguments without --elaswave, without one of these names, or with
    anything but a whole number for one of them.
    """
    if not isinstance(args, argparse.Namespace) and not hasattr(args, "__dict__"):
        raise ConfigurationError(
            f"attach got a {type(args).__name__}, wanted the parsed arguments: write "
            "job = elaswave.attach(parser.parse_args())"
        )
    if not hasattr(args, "elaswave"):
        raise ConfigurationError(
            "the arguments have no --elaswave: write elaswave.add_arguments(parser) before "
            "parser.parse_args()"
        )
    missing = [name for name in (*_BATCHES, "seed") if not hasattr(args, name)]
    if missing:
        lines = "; ".join(f"args.{name} = ..." for name in missing)
        raise ConfigurationError(
            f"the arguments have no {' and no '.join(missing)}, by which attach knows how to deal "
            f"the batch and draw: write {lines} before attach(args)"
        )
    numbers = {name: _whole(args, name) for name in (*_BATCHES, *_PARALLEL)}
    tp, pp = (numbers[name] for name in _PARALLEL)
    batches = {name: numbers[name] for name in _BATCHES}
    return Sizes(**batches, model_parallel=(tp, pp), seed=_whole(args, "seed", least=0))


def _whole(args: Any, name: str, *, least: int = 1) -> int:
    value = getattr(args, name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"args.{name} is {value!r}, wanted a whole number of at least {least}: set it before "
            "attach(args)"
        )
    return value
