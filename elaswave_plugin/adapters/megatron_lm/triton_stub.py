"""A stand-in for the one module that Megatron-LM imports and that imports triton unguarded."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

# megatron/training/initialize.py imports it for enable_batch_invariant_mode; guarded from 0.17 on.
_MODULE = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def without_triton() -> None:
    """Stand in for the kernels where triton is not installed, as in torch's CPU wheels."""
    if _MODULE not in sys.modules and find_spec("triton") is None:
        module: Any = ModuleType(_MODULE)
        module.enable_batch_invariant_mode = _refuse
        module.is_batch_invariant_mode_enabled = lambda: False
        sys.modules[_MODULE] = module


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("--batch-invariant-mode needs triton, which is not installed; leave it out")
