"""The torch.backends entry point: deepspeed.initialize obeys our section, with no line in a script.

torch calls this at the end of its own import (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off). All it
does is watch for the import of deepspeed; then it replaces one function of that module.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_WATCHED = "deepspeed"
_REPLACED = ("initialize", "init_distributed", "comm")


def watch() -> None:
    """Have ``elaswave_plugin.deepspeed.install`` called once deepspeed has been imported."""
    module = sys.modules.get(_WATCHED)
    if module is None:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    elif getattr(module.__spec__, "_initializing", False):
        # The script imported deepspeed first, which is importing torch now.
        module.__class__ = _BeingImported


class _BeingImported(ModuleType):
    """The watched module until somebody asks for one of the functions that ``install`` replaces."""

    def __getattribute__(self, name: str) -> Any:
        get = ModuleType.__getattribute__
        if name in _REPLACED and not get(self, "__spec__")._initializing:
            setattr(self, "__class__", ModuleType)  # noqa: B010  # as mypy allows no other class
            _install()
        return get(self, name)


class _Finder(MetaPathFinder):
    """Finds nothing itself; takes itself away when the watched module is found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as the module's own loader does, then installs."""

    def __init__(self, native: Loader) -> None:
        self._native = native

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        # So that whoever asks the module for its loader gets its own.
        spec.loader = module.__loader__ = self._native
        self._native.exec_module(module)
        _install()


def _install() -> None:
    from elaswave_plugin.deepspeed import install

    install()
