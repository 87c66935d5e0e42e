"""Objects of a script's own that belong to a step: sealed with it, and put back where it is redone.

ema = elaswave_plugin.keep("ema", ExponentialMovingAverage(model))
"""

import random
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.detached import detached_copy
from elaswave_plugin.values.plain import check

Kept = TypeVar("Kept")
# Pairs of name and object, replaced at each call: a process has one script, and no job to hold them
# when it calls.
_OBJECTS: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("kept", default=())


def keep(name: str, value: Kept) -> Kept:
    """Make an object of the script part of the state of each step, and return it.

    A loss puts it back with the step that is redone, and a worker that comes later is given it. It
    has to be the same on all workers that hold the same part of the model, and every worker calls
    this, under the same name, before its first step. Taken are: what has ``state_dict`` and
    ``load_state_dict`` (modules, averages, optimizers, schedulers), generators of torch, NumPy and
    Python, tensors, and dicts and lists of plain values. Without a job it does nothing.
    Raises ConfigurationError for any other object, for one whose state has objects of other
    classes, which do not go to other workers, and for a second one of that name.
    """
    accessors(name, value)
    check_state(name, value)
    known = kept_objects()
    if known.get(name, value) is not value:
        raise ConfigurationError(
            f"keep({name!r}, ...) is called with a second object of that name: use another name"
        )
    _OBJECTS.set(tuple({**known, name: value}.items()))
    return value


def kept_objects() -> Mapping[str, Any]:
    """All objects that the script keeps, by name."""
    return dict(_OBJECTS.get())


def accessors(name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return the function that reads a kept object's state, and the one that installs it.

    Raises ConfigurationError for an object without one.
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict, value.load_state_dict
    if hasattr(value, "get_state") and hasattr(value, "set_state"):  # torch, numpy.random's old one
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if hasattr(value, "copy_"):  # a tensor
        return value.detach, lambda state: value.detach().copy_(state)
    if isinstance(value, dict | list):
        return lambda: value, partial(_refill, value)
    raise ConfigurationError(
        f"keep({name!r}, ...) got a {type(value).__name__}, wanted an object with state_dict and "
        "load_state_dict, a generator of torch, NumPy or Python, a tensor, or a dict or list of "
        "plain values: give it these two methods, or keep its parts"
    )


def check_state(name: str, value: Any) -> None:
    """Raise ConfigurationError where the state of a kept object is not plain."""
    check(accessors(name, value)[0](), f"the state of keep({name!r}, ...)")


def _refill(value: dict[Any, Any] | list[Any], state: Any) -> None:
    value.clear()
    if isinstance(value, dict):
        value.update(detached_copy(state))
    else:
        value.extend(detached_copy(state))


def is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, strings, dicts, lists and tuples."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return type(value) in (type(None), bool, int, float, complex, str, bytes)
