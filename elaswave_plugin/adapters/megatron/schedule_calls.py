"""Checks the arguments of ``forward_backward`` and of the verbs that call a script's functions."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from elaswave_plugin.adapters.megatron.turns import EVALUATE, RUN, TRAIN
from elaswave_plugin.errors import ConfigurationError

# Those that a forward-backward function takes, and the arguments that it takes them by.
_GROUPS = ("tp", "cp", "pp", "embd", "pos_embd", "dp_cp")
_OF_GROUPS = ("pg_collection", "p2p_communicator")
_LIKE = (
    (TRAIN, "job.train(train_step)"),
    (EVALUATE, "job.evaluate(evaluate)"),
    (RUN, 'job.run(save, phase="save")'),
)


def check_schedule(function: Any) -> None:
    """Raise ConfigurationError for anything but a forward-backward function of Megatron-Core."""
    takes = inspect.signature(function).parameters.values() if callable(function) else ()
    if not any(one.name == "forward_step_func" or one.kind is one.VAR_KEYWORD for one in takes):
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigurationError(
            f"job.forward_backward got {name}, wanted a forward-backward function of Megatron-Core:"
            " write job.forward_backward(get_forward_backward_func())"
        )


def check_call(
    given: Mapping[str, Any], *, micro_batch_size: int, count: int, widths: Collection[int]
) -> None:
    """Raise ConfigurationError where a call's sizes are not those of the job.

    ``count``: micro-batches of the global batch; ``widths``: what the script may take for the
    data-parallel size, that of the launch and what it was in the views since.
    """
    missing = [
        name for name in ("forward_step_func", "data_iterator", "model") if name not in given
    ]
    if missing:
        raise ConfigurationError(
            f"forward_backward got no {' and no '.join(missing)}: write {missing[0]}=... there"
        )
    size = given.get("micro_batch_size", micro_batch_size)
    if size != micro_batch_size:
        raise ConfigurationError(
            f"forward_backward got micro_batch_size={size}, and args.micro_batch_size is "
            f"{micro_batch_size}: give it args.micro_batch_size"
        )
    number = given.get("num_microbatches")
    if number is not None and number not in {count // width for width in widths}:
        width = min(widths)
        raise ConfigurationError(
            f"forward_backward got num_microbatches={number}, wanted {count // width}, which are "
            f"the {count} micro-batches of a step over a data parallel size of {width}: leave "
            "num_microbatches out, or set args.global_batch_size before attach(args)"
        )


def without_known(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without what the job, or the function that is called, knows itself.

    The latter are the groups of ``parallel_state``, where both arguments have these.
    """
    kept = {name: value for name, value in given.items() if name != "num_microbatches"}
    if kept.get("decoder_seq_length") == kept.get("seq_length"):
        kept.pop("decoder_seq_length", None)
    own = ProcessGroupCollection.use_mpu_process_groups([*_GROUPS])
    groups, communicator = kept.get("pg_collection"), kept.get("p2p_communicator")
    theirs = [getattr(groups, name, None) for name in _GROUPS]
    theirs.append(getattr(communicator, "pp_group", own.pp))
    known = [*(getattr(own, name) for name in _GROUPS), own.pp]
    if all(one is other for one, other in zip(theirs, known, strict=True)):
        kept = {name: one for name, one in kept.items() if name not in _OF_GROUPS}
    return kept


def check_work(function: Any, verb: str, phase: object = "", *, like: str | None = None) -> None:
    """Raise ConfigurationError where a verb got no function, or no name for its ``phase``.

    ``like``: how a function is given to it, where not as the verb's own.
    """
    like = like or next(line for one, line in _LIKE if one == verb)
    if not isinstance(phase, str):
        raise ConfigurationError(f"job.{verb} got phase={phase!r}, wanted a name: write {like}")
    if not callable(function):
        raise ConfigurationError(
            f"job.{verb} got {type(function).__name__} {function!r:.40}, wanted a function, which "
            f"it calls again after a loss: write {like}, without calling it"
        )
