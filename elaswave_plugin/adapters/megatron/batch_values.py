"""Batches as bytes for other workers, also of classes that a script brings, as a TensorDict.

What is plain travels as it is. An object of another class is taken apart as for a copy, by its
``__reduce_ex__``, and made again only of a class that batches of this worker's own script have.
"""

import copyreg
from collections import OrderedDict
from typing import Any

import torch
from torch.utils import _pytree

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import DEEPEST, check, is_plain

# Tensors of rows of several lengths, which torch makes of all values and of where rows begin.
_JAGGED = str(torch.jagged)
# Whose items may be such objects.
_CONTAINERS = (list, tuple, dict, OrderedDict)


class BatchValues:
    """The batches of one worker's script, and the classes that they have."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def apart(self, value: Any, what: str, depth: int = 0) -> list[Any]:
        """Return a plain value of it: without its objects, with what was on the device, and these.

        Raises ConfigurationError for an object that cannot be copied.
        """
        if depth > DEEPEST:
            raise ConfigurationError(f"{what:.200} is nested in itself: leave that out of a batch")
        leaves, shape = _pytree.tree_flatten(value, is_leaf=_is_leaf)
        on_device = [number for number, one in enumerate(leaves) if _is_on_device(one)]
        objects = {}
        for number in [number for number, one in enumerate(leaves) if not is_plain(one)]:
            paths, _ = _pytree.tree_flatten_with_path(value, is_leaf=_is_leaf)
            where = what + _pytree.keystr(paths[number][0])
            name, how, *parts = self._taken_apart(leaves[number], where)
            objects[number] = [name, how, self.apart(parts, f"{where} ({name})", depth + 1)]
            leaves[number] = None
        return [_pytree.tree_unflatten(leaves, shape), on_device, objects]

    def _taken_apart(self, value: Any, what: str) -> list[Any]:
        """Return an object's class, whether that makes it without its constructor, and of what."""
        if _is_jagged(value):
            return [_JAGGED, True, (value.values(), value.offsets()), None, [], []]
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        make, args, *parts = _reduced(value)
        is_bare = make is copyreg.__newobj__  # type: ignore[attr-defined]
        if kind is object or not (make is kind or (is_bare and args[0] is kind)):
            check(value, what)
        self._classes[name] = kind
        state, items, pairs = (*parts, None, None, None)[:3]
        given = args[1:] if is_bare else args
        return [name, is_bare, given, state, [*(items or ())], [*(pairs or ())]]

    def whole(self, parts: list[Any], what: str) -> Any:
        """Return the value of these, as it was; raises ConfigurationError for an unknown class."""
        value, on_device, objects = parts
        leaves, shape = _pytree.tree_flatten(value, is_leaf=_is_leaf)
        for number in on_device:
            leaves[number] = _on_device(leaves[number])
        for number, (name, is_bare, inner) in objects.items():
            leaves[number] = self._made(name, is_bare, *self.whole(inner, what), what=what)
        return _pytree.tree_unflatten(leaves, shape)

    def _made(
        self, name: str, is_bare: bool, args: Any, state: Any, items: Any, pairs: Any, *, what: str
    ) -> Any:
        """Make an object again, as ``copy.copy`` does; ``is_bare``: without its constructor."""
        kind = self._classes.get(name)
        if name == _JAGGED:
            return torch.nested.nested_tensor_from_jagged(*args)
        if kind is None:
            raise ConfigurationError(
                f"{what} of another worker is of the class {name}, and none of this worker's is:"
                " give batches of the same classes on all workers"
            )
        made: Any = kind.__new__(kind, *args) if is_bare else kind(*args)
        if hasattr(made, "__setstate__") and state is not None:
            made.__setstate__(state)
        elif state is not None:
            fields, slots = state if isinstance(state, tuple) else (state, None)
            for field, one in {**(fields or {}), **(slots or {})}.items():
                object.__setattr__(made, field, one)
        if items:
            made.extend(items)
        for key, one in pairs:
            made[key] = one
        return made


def _is_leaf(value: Any) -> bool:
    return type(value) not in _CONTAINERS


def _is_jagged(value: Any) -> bool:
    is_jagged = torch.is_tensor(value) and value.layout == torch.jagged
    return is_jagged and value.lengths() is None and value.is_contiguous()


def _is_on_device(value: Any) -> bool:
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return is_device or (torch.is_tensor(value) and value.is_cuda)


def _on_device(value: Any) -> Any:
    """Return a tensor on the device of this worker, or that device."""
    return (
        value.cuda()
        if torch.is_tensor(value)
        else torch.device("cuda", torch.cuda.current_device())
    )


def _reduced(value: Any) -> Any:
    """Return what makes a copy of a value, and of what; two None where it has no copy."""
    try:
        reduced = value.__reduce_ex__(2)
    except TypeError:
        return None, None
    return reduced if isinstance(reduced, tuple) else (None, None)
