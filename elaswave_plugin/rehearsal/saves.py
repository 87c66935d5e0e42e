"""Leads what a script saves into a folder of the rehearsal.

While a save runs, Python's own calls that make a path, open it for writing or rename to it do so
below that folder, and those that read or remove find there what was written before.
"""

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Functions of a path that is there, below the folder or not; of one that is made; of two paths.
_LOOK = ("stat", "lstat", "listdir", "scandir", "access", "rmdir", "remove", "unlink")
_CHANGE = ("mkdir",)
_SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
_MOVE = ("rename", "replace", "link", "symlink")


class LedSaves:
    """The saves of one process, below ``folder``; what is below ``free`` already stays there."""

    def __init__(self, folder: Path, *, free: Path) -> None:
        self._folder = str(folder)
        self._free = (str(free), "/dev/", "/proc/", "/sys/")
        self._depth = 0

    @contextmanager
    def led(self) -> Iterator[None]:
        """Redirect what is written inside the block to below the folder."""
        self._depth += 1
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in self._replaced()]
        if self._depth == 1:
            for owner, name, led in list(self._replaced()):
                setattr(owner, name, led)
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for owner, name, native in kept:
                    setattr(owner, name, native)

    def place(self, path: Any, *, writes: bool) -> Any:
        """Return where a path is: below the folder if it is written, or is there already."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path  # a descriptor
        absolute = os.path.abspath(os.fsdecode(path))
        if absolute.startswith(self._free):
            return path
        led = self._folder + absolute
        return led if writes or os.path.lexists(led) else path

    def _replaced(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for owner, name in ((builtins, "open"), (io, "open")):
            yield owner, name, partial(self._open, getattr(owner, name))
        yield os, "open", partial(self._open_descriptor, os.open)
        for name in _LOOK:
            yield os, name, partial(self._call, getattr(os, name), False)
        for name in _CHANGE:
            yield os, name, partial(self._call, getattr(os, name), True)
        for name in _MOVE:
            yield os, name, partial(self._move, getattr(os, name))
        yield torch, "save", partial(self._save, torch.save)
        for name in _SAFETENSORS:
            if (module := sys.modules.get(name)) is not None:
                yield module, "serialize_file", partial(self._save, module.serialize_file)

    def _open(self, native: Any, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        return native(self._made(path) if writes else self._seen(path), mode, *args, **kwargs)

    def _open_descriptor(self, native: Any, path: Any, flags: int, *args: Any, **more: Any) -> Any:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return native(self._made(path) if writes else self._seen(path), flags, *args, **more)

    def _call(self, native: Any, writes: bool, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return native(path, *args, **kwargs)
        return native(self._made(path) if writes else self._seen(path), *args, **kwargs)

    def _move(self, native: Any, source: Any, target: Any, **kwargs: Any) -> Any:
        return native(self._seen(source), self._made(target), **kwargs)

    def _save(self, native: Any, value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        return native(value, self._made(file), *args, **kwargs)

    def _seen(self, path: Any) -> Any:
        return self.place(path, writes=False)

    def _made(self, path: Any) -> Any:
        led = self.place(path, writes=True)
        if led is not path:
            self._make_parents(os.path.dirname(led))
        return led

    def _make_parents(self, folder: str) -> None:
        """The folders that are there under the script's own name are there below ours as well."""
        os.makedirs(folder, exist_ok=True)
