"""Inputs and outputs of a model as plain values and back, whatever classes a script has for them.

Data classes, named tuples and mappings are told by the name of their class, and built again where
a file of the model, or the script, has a class of that name: no other class is. What else an
object in an output holds (a cache of keys and values) is None in the form of it.
"""

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from elaswave_plugin.errors import ConfigurationError, UnreadableValueError
from elaswave_plugin.values.plain import check

# Of no script.
_OF_ALL = (dict, list, tuple, OrderedDict)


class Forms:
    """The classes of one model's inputs and outputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        files = {base.__module__ for one in model.modules() for base in type(one).__mro__}
        found = (
            one
            for file in sorted({"__main__", *files} & sys.modules.keys())
            for one in vars(sys.modules[file]).values()
            if isinstance(one, type) and _has_fields(one)
        )
        self._classes: dict[str, Any] = {_name(one): one for one in found}

    def told(self, value: Any, what: str, *, lossy: bool = False) -> Any:
        """Return a plain value for this one; ``lossy``: objects within it are left out.

        Raises ConfigurationError for one that is not told.
        """
        parts = _parts(value)
        if parts is None:
            check(value, what)
            return None, value
        kind = type(value)
        if kind not in _OF_ALL and _name(kind) not in self._classes:
            if not isinstance(value, Mapping):
                raise ConfigurationError(
                    f"{what} is of the class {_name(kind)}, which neither the script nor a file"
                    " of the model has by name, so that no other worker can build it after a loss:"
                    " import the class there, or pass a dict or tuple"
                )
            kind = dict
        told = {key: self._part(one, f"{what}[{key!r:.80}]", lossy) for key, one in parts.items()}
        return _name(kind), told

    def _part(self, value: Any, what: str, lossy: bool) -> Any:
        try:
            return self.told(value, what, lossy=lossy)
        except ConfigurationError:
            if not lossy:
                raise
        return None, None

    def made(self, told: Any) -> Any:
        """Return what was told; raises UnreadableValueError for an unknown class."""
        name, parts = told
        if name is None:
            return parts
        values = {key: self.made(one) for key, one in parts.items()}
        kind = next((one for one in _OF_ALL if _name(one) == name), self._classes.get(name))
        if kind in (list, tuple):
            return kind(values.values())
        if kind is None:
            raise UnreadableValueError(f"the class {name!r:.200} of another worker is unknown here")
        if hasattr(kind, "_fields") or is_dataclass(kind):
            return kind(**values)
        return kind(values)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_fields(kind: type) -> bool:
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_dataclass(kind) or is_named_tuple or issubclass(kind, Mapping)


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container, by key; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None
