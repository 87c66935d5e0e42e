"""Leads what a script saves into a folder of the rehearsal.

While a save runs, Python's own calls that make a path, open it for writing or rename to it do so
below that folder, and those that read or remove find there what was written before.
"""

import builtins
import io
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elaswave_plugin.rehearsal.files import is_writing

# Functions by what their first arguments are: a path that is there, below the folder or not; one
# that is made; no path.
_THERE, _MADE, _NO_PATH = False, True, None
_CALLS = (
    (("stat", "lstat", "listdir", "scandir", "access", "rmdir", "remove", "unlink"), (_THERE,)),
    (("mkdir",), (_MADE,)),
    (("rename", "replace", "link", "symlink"), (_THERE, _MADE)),
)
_SAFETENSORS = ("safetensors.torch", "safetensors.numpy")


class LedSaves:
    """The saves of one process, below ``folder``; what is below ``free`` already stays there."""

    def __init__(self, folder: Path, *, free: Path) -> None:
        self._folder = str(folder)
        self._free = (str(free), "/dev/", "/proc/", "/sys/")
        self._depth = 0
        self._natives: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """From now on, what is written goes below the folder, until as many ends."""
        self._depth += 1
        for owner, name, makes in list(self._led_calls()) if self._depth == 1 else ():
            native = getattr(owner, name)
            self._natives.append((owner, name, native))
            setattr(owner, name, partial(self._call, native, makes))

    def end(self) -> None:
        """A save is over."""
        self._depth -= 1
        while self._natives and not self._depth:
            setattr(*self._natives.pop())

    def _led_calls(self) -> Iterator[tuple[Any, str, tuple[bool | None, ...]]]:
        """Yield functions, and what their first arguments are; an open says so by its second."""
        yield from ((owner, "open", ()) for owner in (builtins, io, os))
        for names, makes in _CALLS:
            yield from ((os, name, makes) for name in names)
        yield torch, "save", (_NO_PATH, _MADE)
        for name in _SAFETENSORS:
            if (module := sys.modules.get(name)) is not None:
                yield module, "serialize_file", (_NO_PATH, _MADE)

    def _call(self, native: Any, makes: tuple[bool | None, ...], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            makes = makes or (is_writing(args[1] if args[1:] else kwargs.get("mode", "r")),)
            both = zip(args, makes, strict=False)
            led = [one if made is _NO_PATH else self._place(one, made) for one, made in both]
            args = (*led, *args[len(led) :])
        return native(*args, **kwargs)

    def _place(self, path: Any, made: bool) -> Any:
        """Return where a path is: below the folder if it is made, or is there already."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path  # a descriptor
        absolute = os.path.abspath(os.fsdecode(path))
        if absolute.startswith(self._free):
            return path
        led = self._folder + absolute
        if made:
            # The folders that are there under the script's own name are there below ours as well.
            os.makedirs(os.path.dirname(led), exist_ok=True)
        return led if made or os.path.lexists(led) else path
