"""The torch.backends entry point: frameworks obey our settings, with no line in a script.

torch calls this at the end of its own import (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off). It
watches for the import of deepspeed, megatron.training and accelerate.state; then functions of those
modules are replaced by ones that look whether the plugin is wanted. In a process that an agent
started, it also has the agent told where nothing of that happened.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple

# Set for the workers of a job (ipc/environment.py, AGENT).
_SUPERVISED = "ELASWAVE_AGENT"


class _Watched(NamedTuple):
    """A module, what ``install()`` of ours replaces in it, and whether ours has ``prepare()``."""

    name: str
    ours: str
    replaced: tuple[str, ...]
    prepares: bool

    def prepare(self) -> None:
        """Do what has to be done before the module is imported."""
        if self.prepares:
            import_module(self.ours).prepare()

    def install(self) -> None:
        """Do what has to be done once it is imported, and again where it was imported again."""
        import_module(self.ours).install()


_WATCHED = (
    ("deepspeed", "elaswave_plugin.deepspeed", ("initialize", "init_distributed", "comm"), False),
    ("megatron.core", "elaswave_plugin.megatron_core", ("parallel_state",), False),
    ("megatron.training", "elaswave_plugin.megatron_lm", ("pretrain",), True),
    ("accelerate.state", "elaswave_plugin.accelerate_state", ("PartialState",), False),
)


def watch() -> None:
    """Have ``install()`` of ours called whenever a watched module has been executed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for watched in map(_Watched._make, _WATCHED):
        # The script imported it first, which is importing torch now.
        _catch_up(watched)
    if _SUPERVISED in os.environ:
        import_module("elaswave_plugin.loops.unjoined").watch()


def _catch_up(watched: _Watched) -> None:
    """Watch a module that is being executed already, by a loader that is not ours."""
    module = sys.modules.get(watched.name)
    spec = getattr(module, "__spec__", None)
    if type(module) is not ModuleType or not getattr(spec, "_initializing", False):
        return
    if not isinstance(getattr(spec, "loader", None), _Loader):
        watched.prepare()
        setattr(module, "__class__", _being_imported(watched))  # noqa: B010  # mypy allows no other


def _being_imported(watched: _Watched) -> type[ModuleType]:
    class BeingImported(ModuleType):
        """The watched module, until one of the functions that are replaced is asked for."""

        def __getattribute__(self, name: str) -> Any:
            get = ModuleType.__getattribute__
            if name in watched.replaced and not get(self, "__spec__")._initializing:
                setattr(self, "__class__", ModuleType)  # noqa: B010  # mypy allows no other class
                watched.install()
            return get(self, name)

    return BeingImported


class _Finder(MetaPathFinder):
    """Finds watched modules where the other finders do; a mere search changes nothing."""

    def __init__(self) -> None:
        self._watched = {watched.name: watched for watched in map(_Watched._make, _WATCHED)}
        # Other finders may ask all finders in turn, this one among them.
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that installs; None for any other module."""
        watched = self._watched.get(name)
        if watched is None:
            # A finder before this one may have found the package that this is a part of.
            parent = self._watched.get(name.rpartition(".")[0])
            if parent is not None:
                _catch_up(parent)
            return None
        asked = get_ident(), name
        if asked in self._asking:
            return None
        with self._ask(asked):
            specs = (finder.find_spec(name, path, target) for finder in self._others())
            spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(watched, spec.loader)
        return spec

    @contextmanager
    def _ask(self, asked: tuple[int, str]) -> Iterator[None]:
        self._asking.add(asked)
        try:
            yield
        finally:
            self._asking.discard(asked)

    def _others(self) -> list[Any]:
        """Return the other finders that know this protocol."""
        return [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]


class _Loader:
    """The module's own loader in all respects, which also installs."""

    def __init__(self, watched: _Watched, native: Any) -> None:
        self._watched = watched
        self._native = native

    def __getattr__(self, name: str) -> Any:
        if name == "_native":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._native, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        """Create what the native loader creates."""
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then install; also where it is executed again."""
        self._watched.prepare()
        self._native.exec_module(module)
        # So that code that asks the module for its loader gets its own.
        for holder, name in ((module.__spec__, "loader"), (module, "__loader__")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._native)
        self._watched.install()
