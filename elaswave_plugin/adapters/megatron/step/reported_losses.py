"""The losses that a script reports, in the forms that Megatron-Core's own loops take."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from elaswave_plugin.errors import ConfigurationError

_FORMS = "(sum, tokens), a tensor of these two, one mean, or a dict with one of them"


class Reported(NamedTuple):
    """A loss as sum and weight; a mean alone weighs one micro-batch, whose tokens are unknown."""

    total: float
    weight: float
    tokens: float


def _reading(name: str) -> Any:
    def method(self: "Reports", *values: Any) -> Any:
        self.asks("losses")
        return getattr(self.plain, name)(*values)

    return method


class Reports(list[Any]):
    """Losses of micro-batches as a script reads them, which is told; ``plain``: as they are."""

    def __init__(self, plain: list[Any], asks: Callable[[str], None]) -> None:
        class Told(torch.Tensor):
            """A loss that is read from the list's own memory, as by torch.stack."""

            @classmethod
            def __torch_function__(
                cls, function: Any, types: Any, values: Any = (), named: Any = None
            ) -> Any:
                asks("losses")
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*values, **(named or {}))

        super().__init__(one.as_subclass(Told) if torch.is_tensor(one) else one for one in plain)
        self.plain, self.asks = plain, asks

    __len__, __iter__, __getitem__ = map(_reading, ("__len__", "__iter__", "__getitem__"))
    __add__, __mul__, __repr__ = map(_reading, ("__add__", "__mul__", "__repr__"))
    __reversed__, copy, index, pop = map(_reading, ("__reversed__", "copy", "index", "pop"))

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __bool__(self) -> bool:
        return bool(self.plain)


class KeptReports:
    """The reports of a call's passes, each as it is once Megatron-Core has divided its loss.

    It keeps the tensors themselves, and a script may write the next report over the last one; the
    loss itself is emptied in a pipeline (schedules.py, ``deallocate_output_tensor``).
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._newest: list[Any] = []

    def note(self, forward_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward step, of whose loss function the reports are kept."""
        self.take()
        output, loss_function = forward_step(*args, **kwargs)
        if loss_function is None:
            return output, None

        def noted_loss(*values: Any, **named: Any) -> Any:
            outputs = loss_function(*values, **named)
            # They share the storage, and so the division.
            self._newest.append(_each_tensor(torch.Tensor.detach, outputs[-1]))
            return outputs

        return output, noted_loss

    def take(self) -> list[Any]:
        """Keep the newest, whose loss is divided by now; returns all."""
        self._kept += _each_tensor(torch.clone, self._newest)
        self._newest.clear()
        return self._kept


def reported(value: Any) -> Reported:
    """Read what a micro-batch's loss function reported; raises ConfigurationError for other forms.

    As megatron/training/training.py, ``train_step``, tells them apart: two numbers are sum and
    tokens, one is a mean.
    """
    if isinstance(value, Mapping):
        if len(value) != 1:
            raise ConfigurationError(
                f"loss_func reports {len(value)} losses ({', '.join(map(str, value))}), and "
                "job.train reports one: return a dict with that one"
            )
        (value,) = value.values()
    numbers = _numbers(value)
    if numbers is None or len(numbers) not in (1, 2):
        raise ConfigurationError(
            f"loss_func reports {_shown(value)}, wanted {_FORMS}: change what it returns last"
        )
    if len(numbers) == 1:
        return Reported(total=numbers[0], weight=1.0, tokens=0.0)
    return Reported(total=numbers[0], weight=numbers[1], tokens=numbers[1])


def first_loss(value: Any) -> Reported:
    """Like ``reported``, of the first of several losses; not a number for what has another form."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    numbers = _numbers(value)
    if numbers is None or len(numbers) not in (1, 2):
        return Reported(total=math.nan, weight=1.0, tokens=0.0)
    return reported(value)


def check_result(result: Any, *known: Sequence[Any]) -> tuple[list[Reported], float]:
    """Losses and gradient norm of a ``train_step``; raises ConfigurationError for other results.

    ``known``: what each call of forward_backward returned in it.
    """
    wanted = (
        "wanted (losses, grad_norm): write `return losses, grad_norm` at the end of train_step, "
        "with the list that forward_backward returned and the norm that optimizer.step() did"
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigurationError(f"train_step returned {_shown(result)}, {wanted}")
    losses, norm = result
    losses = _plain(losses)
    norms = [0.0] if norm is None else _numbers(norm)
    if isinstance(norm, bool) or norms is None or len(norms) != 1:
        raise ConfigurationError(f"train_step returned {_shown(norm)} as gradient norm, {wanted}")
    called = next((one for one in known if one is losses), None)
    if called is None:
        told = _told(losses)
        called = next((one for one in known if repr(_told(one)) == repr(told)), known[-1])
    return check_losses(losses, called, of="train_step"), norms[0]


def check_losses(losses: Any, known: Sequence[Any], *, of: str) -> list[Reported]:
    """The losses that ``of`` returned; raises ConfigurationError unless they are those ``known``.

    ``known``: what forward_backward returned, one a micro-batch.
    """
    told, losses = [reported(one) for one in known], _plain(losses)
    if losses is known:
        return told
    given = _told(losses)
    # As text, in which a loss that is not a number equals itself.
    if given is None or repr(given) != repr(told):
        raise ConfigurationError(
            f"{of} returned {_shown(losses)} as losses, wanted the list that forward_backward "
            f"returned, which has {len(known)} of them here: return that list"
        )
    return told


def _plain(losses: Any) -> Any:
    return losses.plain if isinstance(losses, Reports) else losses


def _told(losses: Any) -> list[Reported] | None:
    return [reported(one) for one in losses] if _is_list(losses) else None


def check_evaluation(result: Any, known: Sequence[Sequence[Any]]) -> list[list[Reported]]:
    """The losses of every batch of an ``evaluate``; raises ConfigurationError for others.

    ``known``: what each call of forward_backward in it returned.
    """
    if not _is_list(result) or not result or len(result) != len(known):
        raise ConfigurationError(
            f"evaluate returned {_shown(result)}, wanted a list of what forward_backward returned, "
            f"which it called {len(known)} times: collect that, one a call, and return the list"
        )
    return [check_losses(*both, of="evaluate") for both in zip(result, known, strict=True)]


def _each_tensor(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, function, value)


def _numbers(value: Any) -> list[float] | None:
    """The numbers of a tensor or a sequence; None where it is neither."""
    if isinstance(value, torch.Tensor):
        return [float(one) for one in value.detach().flatten().tolist()] if value.numel() else []
    if isinstance(value, tuple | list):
        parts = [_numbers(one) for one in value]
        flat = [number for part in parts for number in part or ()]
        return None if any(part is None or len(part) != 1 for part in parts) else flat
    if isinstance(value, int | float):
        return [float(value)]
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if _is_list(value):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "None"
