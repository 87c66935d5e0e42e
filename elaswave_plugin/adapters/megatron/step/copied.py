"""The pieces of a copied iterator: generators by their functions, and loaders that a run reads."""

import dis
from collections.abc import Iterator
from enum import Enum
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

# Of a copy's loaders, the names under which they have their run, and their number.
RUN, SOURCE = "_elaswave_run", "_elaswave_source"
# A device is this worker's, whosever batches it has.
_COMMON = (
    torch.device,
    *(type, FunctionType, ModuleType, CodeType),
    *(torch.Tensor, torch.nn.Module, Dataset, np.ndarray),
)


class Own(Enum):
    """Pieces that are others in each copy."""

    REPLICA = 0
    RUN = 1


class Run(Protocol):
    """A copy's reader of its loaders."""

    @property
    def replica(self) -> int:
        """The replica that it reads for."""

    def batches(self, source: int, sampler: Any) -> Iterator[Any]:
        """Pass over a loader once, in the order of ``sampler``."""


def is_common(value: Any) -> bool:
    """Return whether copies have an object in common, by its kind."""
    if isinstance(value, BuiltinFunctionType):
        # Those of an object, as ``append``, are the copy's.
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, _COMMON) or _has_model(value)


def _has_model(value: Any) -> bool:
    """Return whether an object trains a model, as one does whose method a generator is."""
    for one in getattr(value, "__dict__", {}).values():
        first = one[0] if type(one) is list and one else one
        if isinstance(first, torch.nn.Module):
            return True
    return False


def of_class(kind: Any) -> Any:
    """Return an object of a class, without what it has."""
    return kind.__new__(kind)


def loader(kind: Any) -> Any:
    """Return a loader of a class of the script's, whose batches its run reads."""
    if kind is DataLoader:
        return of_class(_Loader)
    return of_class(type(kind.__name__, (kind, _Loader), {}))


def one_pass(run: Run, source: int, sampler: Any) -> Iterator[Any]:
    """Return the iterator of a loader, from its first batch on."""
    return run.batches(source, sampler)


class _Loader(DataLoader[Any]):
    def __iter__(self) -> Any:
        own = vars(self)
        return own[RUN].batches(own[SOURCE], self._index_sampler)


def generator(
    code: CodeType, around: dict[str, Any], named: dict[str, Any], local: dict[str, Any]
) -> Any:
    """Call a generator's function again.

    ``around``: its globals, of which it names ``named``; ``local``: its arguments and the variables
    of the functions around it. Raises NameError where one of those has no value.
    """
    unset = [one for one in code.co_freevars if one not in local]
    if unset:
        raise NameError(f"its variable {unset[0]} has no value yet")
    cells = tuple(CellType(local[one]) for one in code.co_freevars)
    function = FunctionType(code, {**around, **named}, code.co_name, None, cells)
    count, others = code.co_argcount, code.co_kwonlyargcount
    values = [local[one] for one in code.co_varnames[:count]]
    named_only = {one: local[one] for one in code.co_varnames[count : count + others]}
    rest = iter(code.co_varnames[count + others :])
    if code.co_flags & CO_VARARGS:
        values += local[next(rest)]
    if code.co_flags & CO_VARKEYWORDS:
        named_only |= local[next(rest)]
    return function(*values, **named_only)


def globals_of(code: CodeType) -> list[str]:
    """List the globals that a function names, and those within it."""
    names = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for one in code.co_consts:
        names.update(globals_of(one) if isinstance(one, CodeType) else ())
    return sorted(names)
