"""Dataclasses as JSON and back, by their fields and type hints: a kind of message costs one class.

A dataclass is an object on the wire, without the fields that have their default. A message also
names its kind there.

>>> import json
>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class StopBefore(WireMessage):
...     step: int
...     nodes: tuple[int, ...] = ()
>>> text = json.dumps(StopBefore(step=3, nodes=(0, 1)), default=to_json)
>>> text
'{"t": "stop_before", "step": 3, "nodes": [0, 1]}'
>>> from_json(StopBefore, json.loads(text))
StopBefore(step=3, nodes=(0, 1))
>>> json.dumps(StopBefore(step=3), default=to_json)
'{"t": "stop_before", "step": 3}'
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from elaswave_plugin.core.runs import numbers_of, runs_text

# The key of a message's kind.
KIND = "t"
# A list of this many numbers or more is written by its runs.
_LONG = 16
Reader = Callable[[Any], Any]


class WireMessage:
    """Base of the messages, each of which is of the kind that its class names."""

    __slots__ = ()


class UnreadableMessageError(ValueError):
    """A message of an unknown kind, or with a flaw: another version sent it."""

    def __init__(self, kind: object, flaw: str = ", unknown here") -> None:
        super().__init__(
            f"said {kind!r:.60}{flaw}: have all run the same version of elaswave_plugin"
        )


class _FlawError(Exception):
    """A flaw in an object, as text for the sentence of UnreadableMessageError."""


@cache
def kind_of(message: type) -> str:
    """Return the kind of a message on the wire: "stop_before" for StopBefore."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", message.__name__).lower()


def to_json(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass, for `json.dumps(..., default=to_json)`.

    Raises TypeError for anything else.
    """
    if not is_dataclass(value):
        raise TypeError(f"{value!r:.100} is no dataclass, and JSON cannot carry it")
    kind: type = type(value)
    given = {name: (getattr(value, name), default) for name, default in _defaults(kind)}
    present = {name: one for name, (one, default) in given.items() if one != default}
    return {KIND: kind_of(kind), **present} if isinstance(value, WireMessage) else present


def to_wire(value: object) -> dict[str, Any]:
    """Return what `to_json` does, with long lists of numbers, such as ranks, as text."""
    return {name: shortened(one) for name, one in to_json(value).items()}


def shortened(value: Any) -> Any:
    """Return the text of the runs of a long list of numbers, where that is shorter."""
    if not isinstance(value, tuple | list) or len(value) < _LONG:
        return value
    if set(map(type, value)) != {int}:
        return value
    text = runs_text(value)
    return text if len(text) < 2 * len(value) else value


def from_json(hint: Any, record: Any) -> Any:
    """Return what `to_json` described; raises UnreadableMessageError for anything else.

    `hint`: a dataclass or a union of messages. Their fields may be scalars, IntEnums, tuples,
    sequences, mappings, dataclasses and messages, each of these or None, and Any for what is read
    elsewhere.
    """
    try:
        return _reader(hint)(record)
    except UnreadableMessageError:
        raise
    except _FlawError as error:
        raise UnreadableMessageError(hint.__name__, str(error)) from error
    except TypeError as error:
        raise UnreadableMessageError(record) from error


@cache
def _defaults(kind: Any) -> tuple[tuple[str, object], ...]:
    """Each field with its default; MISSING, which equals no value, where it has none."""
    return tuple(
        (one.name, one.default if one.default_factory is MISSING else one.default_factory())
        for one in fields(kind)
    )


@cache
def _reader(hint: Any) -> Reader:
    """Return what reads a value of this type, and raises TypeError or ValueError for others."""
    origin, inner = get_origin(hint), get_args(hint)
    choice = inner if origin in (Union, UnionType) else (hint,)
    kinds = {kind_of(one): _object_reader(one) for one in choice if _is_message(one)}
    if kinds:
        read = partial(_read_message, kinds)
        return partial(_read_or_none, read) if NoneType in choice else read
    if len(choice) > 1:
        (given,) = (one for one in choice if one is not NoneType)
        return partial(_read_or_none, _reader(given))
    if hint is Any:
        return _as_it_is
    if is_dataclass(hint):
        return _object_reader(hint)
    if origin is tuple and inner[-1] is not ...:
        return partial(_read_each, tuple(map(_reader, inner)))
    if is_typeddict(hint):
        return partial(_checked, dict)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return hint
    if origin is None:
        return partial(_checked, (int, float) if hint is float else hint)
    if issubclass(origin, Mapping):
        return partial(_read_mapping, inner[0], _reader(inner[1]))
    made = tuple if origin is tuple else list
    if inner[0] in (int, str):
        return partial(_read_alike, made, inner[0])
    return partial(_read_many, made, _reader(inner[0]))


def _is_message(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint) and issubclass(hint, WireMessage)


def _object_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {name: _reader(hints[name]) for name, _ in _defaults(kind)}
    needed = [name for name, default in _defaults(kind) if default is MISSING]
    return partial(_read_object, kind, readers, needed)


def _read_message(kinds: Mapping[str, Reader], record: Any) -> Any:
    present = dict(_checked(dict, record))
    kind = present.pop(KIND, None)
    if not isinstance(kind, str) or kind not in kinds:
        raise UnreadableMessageError(kind)
    try:
        return kinds[kind](present)
    except _FlawError as error:
        raise UnreadableMessageError(kind, str(error)) from error


def _read_object(kind: Any, readers: Mapping[str, Reader], needed: list[str], record: Any) -> Any:
    values = {}
    for name, one in _checked(dict, record).items():
        if name not in readers:
            raise _FlawError(f" with {name!r}, unknown here")
        try:
            values[name] = readers[name](one)
        except UnreadableMessageError:
            raise
        except (TypeError, ValueError) as error:
            raise _FlawError(f" with {name} {one!r:.60}") from error
    for name in needed:
        if name not in values:
            raise _FlawError(f" without {name!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise _FlawError(f" with something else in it ({error})") from error


def _read_or_none(read: Reader, value: Any) -> Any:
    return None if value is None else read(value)


def _read_mapping(key: Any, read: Reader, value: Any) -> dict[Any, Any]:
    return {key(name): read(one) for name, one in _checked(dict, value).items()}


def _read_each(readers: tuple[Reader, ...], value: Any) -> tuple[Any, ...]:
    return tuple(read(one) for read, one in zip(readers, _checked(list, value), strict=True))


def _read_many(made: type, read: Reader, value: Any) -> Any:
    return made(map(read, _checked(list, value)))


def _read_alike(made: type, kind: type, value: Any) -> Any:
    """Read scalars of one type at once: a commit to 512 workers of one group has a million."""
    if kind is int and isinstance(value, str):
        return made(numbers_of(value))
    if not set(map(type, _checked(list, value))) <= {kind}:
        raise TypeError(f"not all of {value!r:.60} are {kind}")
    return made(value)


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} is not {kind}")
    return value


def _as_it_is(value: Any) -> Any:
    return value
