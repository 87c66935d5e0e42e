"""Parameters that modules of ZeRO-3 use beside their own: alike on all workers after a change.

DeepSpeed finds them in the first forward pass, where a parameter of another module is used (a tied
embedding, the weights that `nn.MultiheadAttention` reads of its `out_proj`), and from then on
gathers them with those of the module (`register_external_parameter`, parameter_offload.py). A
worker that knows of other ones than the rest would gather in another order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

from elaswave_plugin.values.plain import gathered

# Of a module, of the parameter, and whether it left its module as an output.
_Use = tuple[str, str, bool]


@contextmanager
def finding_external(model: Any) -> Iterator[None]:
    """Have a pass through the model find them, as one through the engine does."""
    _find(model, True)
    try:
        yield
    finally:
        _find(model, False)


def agree_on_external(model: Any) -> None:
    """Have each worker know what any of them has found (collective over WORLD).

    Those that a loss interrupts in the first pass have come to different places in it, and a
    newcomer has run none.
    """
    everyone: list[list[_Use]] = gathered(_found(model))
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    for module, param, is_output in sorted({use for one in everyone for use in one}):
        register_external_parameter(modules[module], params[param])
        params[param].is_external_param |= is_output


def _found(model: Any) -> list[_Use]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        (name, names[key], param.is_external_param)
        for name, module in model.named_modules()
        for key, param in getattr(module, "_external_params", {}).items()
        if key in names
    ]


def _find(model: Any, is_forward: bool) -> None:
    for module in model.modules():
        if isinstance(module._parameters, ZeROOrderedDict):
            module._parameters._in_forward = is_forward
