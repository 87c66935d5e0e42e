"""Copies of a cluster's state, and digests that are alike for states that cannot be told apart."""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from elaswave_plugin.testing import Cluster

# What was said of a run, and counts of it, make no difference to what follows.
UNTOLD = frozenset({"lines", "verbose"})
ATOMS = (int, float, str, bytes, bool, type(None), Enum, type)


def fork(cluster: Cluster) -> Cluster:
    """Copy a cluster; frozen dataclasses are shared, as nobody changes them."""
    copied: Cluster = _copy(cluster, {})
    return copied


def _copy(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, ATOMS) or _is_frozen(value):
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        return tuple(_copy(one, known) for one in value)
    made: Any
    if isinstance(value, dict):
        made = known[id(value)] = type(value)()
        for key, one in value.items():
            made[key] = _copy(one, known)
    elif isinstance(value, list | deque):
        made = known[id(value)] = type(value)()
        made.extend(_copy(one, known) for one in value)
    elif isinstance(value, set | frozenset):
        made = known[id(value)] = type(value)(_copy(one, known) for one in value)
    else:
        made = known[id(value)] = object.__new__(type(value))
        for name, one in _attributes(value):
            object.__setattr__(made, name, _copy(one, known))
    return made


def _is_frozen(value: Any) -> bool:
    return is_dataclass(value) and type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    slots = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return [*slots, *vars(value).items()] if hasattr(value, "__dict__") else slots


class Digests:
    """Digests of clusters; what does not change is read once, whichever of them share it."""

    def __init__(self) -> None:
        # With the value itself, so that its id is nobody else's.
        self._texts: dict[int, tuple[Any, str]] = {}

    def of(self, cluster: Cluster) -> bytes:
        """Return the same for two clusters in which the same may happen from now on."""
        told = {name: one for name, one in vars(cluster).items() if name not in UNTOLD}
        # Each link delivers in its order; which link does so first is for the explorer to choose.
        told["order"] = Counter(cluster.order)
        return hashlib.blake2b(self._text(told).encode(), digest_size=16).digest()

    def _text(self, value: Any) -> str:
        if isinstance(value, ATOMS):
            return repr(value)
        if isinstance(value, dict):
            pairs = sorted(f"{self._text(key)}:{self._text(one)}" for key, one in value.items())
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, set | frozenset):
            return f"<{','.join(sorted(map(self._text, value)))}>"
        if isinstance(value, list | tuple | deque):
            return f"[{','.join(map(self._text, value))}]"
        if not _is_frozen(value):
            return self._parts(value, _attributes(value))
        if id(value) not in self._texts:
            parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
            self._texts[id(value)] = value, self._parts(value, parts)
        return self._texts[id(value)][1]

    def _parts(self, value: Any, parts: Sequence[tuple[str, Any]]) -> str:
        told = ",".join(f"{name}={self._text(one)}" for name, one in parts)
        return f"{type(value).__name__}({told})"
