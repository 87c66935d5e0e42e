"""One layer's forward and backward, run twice alike: where bits differ, its kernels do not repeat.

Both runs have copies of the layer's weights and buffers, so that neither gradients, buffers, hooks
of a gradient nor what is behind the arguments see them. The caller puts generators back.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

# What puts all generators back that a layer may draw from.
Undone = Callable[[], AbstractContextManager[None]]

_CUBLAS, _REPEATING_CUBLAS = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_TE, _TE_MODULE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "transformer_engine"
_APART = (
    "elaswave: a layer was run apart here, to compare its bits; rehearse_first_step off leaves that"
    " out (docs/rehearsal.md)"
)
# Where torch takes kernels of cuDNN.
_OF_CUDNN = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)


class Switch(NamedTuple):
    """A setting that chooses kernels which repeat; ``tried``: has it on, where a call can."""

    text: str
    tried: Callable[[], AbstractContextManager[None]] | None = None


class LayerCall(NamedTuple):
    """A layer with the arguments of one call of it, which have no graph."""

    layer: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def difference(self, undone: Undone) -> str | None:
        """Name the first result whose bits differ between two runs; None where all are equal."""
        first, second = (self._results(undone) for _ in range(2))
        names = (name for name, one in first.items() if not _same_bits(one, second[name]))
        return next(names, None)

    def repeating(self, undone: Undone) -> list[str]:
        """Return the switches, each tried alone, with which both runs have the same bits."""
        found = []
        for switch in switches_left(self.layer):
            if switch.tried is not None:
                with switch.tried():
                    if self.difference(undone) is None:
                        found.append(switch.text)
        return found

    def _results(self, undone: Undone) -> dict[str, torch.Tensor]:
        """Output and gradients of one run; of the switches and generators that there are now."""
        weights = {name: _leaf(one) for name, one in self.layer.named_parameters()}
        buffers = {name: one.detach().clone() for name, one in self.layer.named_buffers()}
        inputs = list[torch.Tensor]()
        args, kwargs = _with_leaves((self.args, self.kwargs), inputs)
        swapped = {f"layer.{name}": one for name, one in (weights | buffers).items()}
        with undone(), torch.enable_grad():
            try:
                outputs = torch.func.functional_call(_Pass(self.layer), swapped, (args, kwargs))
            except Exception as error:
                error.add_note(_APART)
                raise
        found = {f"output {number}": one.detach() for number, one in enumerate(outputs)}
        found |= {
            f"the gradient of input {number}": one.grad
            for number, one in enumerate(inputs)
            if one.grad is not None
        }
        gradients = ((name, _gradient(one)) for name, one in weights.items())
        return found | {
            f"the gradient of {name}": one for name, one in gradients if one is not None
        }


class _Pass(torch.nn.Module):
    """Both passes of a layer: recomputation in the backward pass needs the copies as well."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the outputs that have a gradient, for which they stand themselves."""
        outputs = list[torch.Tensor]()
        for one in _tensors(self.layer(*args, **kwargs)):
            if one.requires_grad:
                outputs.append(one)
        torch.autograd.backward(outputs, [one.detach() for one in outputs])
        return outputs


@contextmanager
def first_call(layer: torch.nn.Module) -> Iterator[list[LayerCall]]:
    """Inside, the first call of the layer is kept: the list has it, or is empty without one."""
    kept = list[LayerCall]()

    def keep(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not kept:
            kept.append(LayerCall(module, *_detached((args, kwargs))))

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        hook.remove()


def may_differ(module: torch.nn.Module) -> bool:
    """Return whether kernels may not repeat: on a GPU, where they add by atomics."""
    return next(module.parameters()).is_cuda


def switches_left(layer: torch.nn.Module) -> list[Switch]:
    """List the switches for what the layer runs that are not set to repeat, likely ones first."""
    found, environment = list[Switch](), os.environ
    if not torch.are_deterministic_algorithms_enabled():
        option = " (--deterministic-mode of Megatron-LM)" if _is_megatron_lm() else ""
        found.append(Switch(f"torch.use_deterministic_algorithms(True){option}", _deterministic))
    if environment.get(_CUBLAS) not in _REPEATING_CUBLAS:
        found.append(Switch(f"{_CUBLAS}={_REPEATING_CUBLAS[0]}"))
    if _TE_MODULE in sys.modules and environment.get(_TE) != "0":
        found.append(Switch(f"{_TE}=0"))
    runs_cudnn = any(isinstance(one, _OF_CUDNN) for one in layer.modules())
    if runs_cudnn and not torch.backends.cudnn.deterministic:
        found.append(Switch("torch.backends.cudnn.deterministic = True", _deterministic_cudnn))
    return found


def advice(layer: torch.nn.Module | None, repeating: list[str]) -> str:
    """Say what to set; ``repeating``: the switches that have been found to help by themselves.

    ``layer``: of this worker, None where it has none.
    """
    left = [] if layer is None else [switch.text for switch in switches_left(layer)]
    if repeating:
        text = f"with {repeating[0]} they do repeat: set it"
        variable = next((one for one in left if one.startswith(_CUBLAS)), None)
        needed = variable is not None and "deterministic_algorithms" in repeating[0]
        return f"{text}, and {variable}, which it needs" if needed else text
    if left:
        return f"set {' and '.join(left)} before the job starts"
    return "every switch that is known here is set, so set consistency to fast"


def _is_megatron_lm() -> bool:
    return "megatron.training" in sys.modules


@contextmanager
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Without warn_only, products raise where cuBLAS has not been told from outside.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _leaf(weight: torch.Tensor) -> torch.Tensor:
    """Return a leaf over the weight's memory, with its attributes and a gradient of its own."""
    leaf = weight.detach().requires_grad_(weight.requires_grad)
    vars(leaf).update(vars(weight))
    if isinstance(getattr(weight, "main_grad", None), torch.Tensor):
        leaf.main_grad = torch.zeros_like(weight.main_grad)  # type: ignore[attr-defined]
        leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return leaf


def _gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what a pass has left; fused kernels add it to ``main_grad`` and return a dummy."""
    if getattr(weight, "grad_added_to_main_grad", False):
        main: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
        return main
    return weight.grad


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all bytes are equal, of NaN too."""
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with other tensors; a named tuple or an object keeps what it has."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(one, change) for one in value)
    if type(value) is dict:
        return {name: _changed(one, change) for name, one in value.items()}
    return value


def _detached(arguments: Any) -> Any:
    """Return arguments without a graph; what had a gradient is to have one again."""
    return _changed(arguments, lambda one: one.detach().requires_grad_(one.requires_grad))


def _with_leaves(arguments: Any, leaves: list[torch.Tensor]) -> Any:
    """Return arguments of new leaves; ``leaves`` has those with a gradient, filled here.

    The first that can have one has it: under recomputation, hidden states come without.
    """

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach()
        if tensor.requires_grad or (not leaves and tensor.is_floating_point()):
            leaves.append(found.requires_grad_())
        return found

    return _changed(arguments, leaf)
