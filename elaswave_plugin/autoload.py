"""The torch.backends entry point: frameworks obey our settings, with no line in a script.

torch calls this at the end of its own import (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off). All it
does is watch for the import of deepspeed and megatron.training; then functions of those modules
are replaced by ones that look whether the plugin is wanted.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple


class _Watched(NamedTuple):
    """A module, what ``install()`` of ours replaces in it, and whether ours has ``prepare()``."""

    name: str
    ours: str
    replaced: tuple[str, ...]
    prepares: bool

    def prepare(self) -> None:
        """What has to be done before the module is imported."""
        if self.prepares:
            import_module(self.ours).prepare()

    def install(self) -> None:
        """What is done once it is imported."""
        import_module(self.ours).install()


_WATCHED = (
    ("deepspeed", "elaswave_plugin.deepspeed", ("initialize", "init_distributed", "comm"), False),
    ("megatron.training", "elaswave_plugin.megatron_lm", ("pretrain",), True),
)


def watch() -> None:
    """Have ``install()`` of ours called once a watched module has been imported."""
    for watched in map(_Watched._make, _WATCHED):
        module = sys.modules.get(watched.name)
        if module is None:
            if not any(getattr(finder, "watched", None) == watched for finder in sys.meta_path):
                sys.meta_path.insert(0, _Finder(watched))
        elif getattr(module.__spec__, "_initializing", False):
            # The script imported it first, which is importing torch now.
            watched.prepare()
            module.__class__ = _being_imported(watched)


def _being_imported(watched: _Watched) -> type[ModuleType]:
    class BeingImported(ModuleType):
        """The watched module until somebody asks for one of the functions that are replaced."""

        def __getattribute__(self, name: str) -> Any:
            get = ModuleType.__getattribute__
            if name in watched.replaced and not get(self, "__spec__")._initializing:
                setattr(self, "__class__", ModuleType)  # noqa: B010  # mypy allows no other class
                watched.install()
            return get(self, name)

    return BeingImported


class _Finder(MetaPathFinder):
    """Finds nothing itself; takes itself away when the watched module is found."""

    def __init__(self, watched: _Watched) -> None:
        self.watched = watched

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.watched.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self.watched, spec.loader)
        return spec


class _Loader(Loader):
    """Loads as the module's own loader does, then installs."""

    def __init__(self, watched: _Watched, native: Loader) -> None:
        self._watched = watched
        self._native = native

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        # So that whoever asks the module for its loader gets its own.
        spec.loader = module.__loader__ = self._native
        self._watched.prepare()
        self._native.exec_module(module)
        self._watched.install()
