"""Refuses to open a file for writing that was there before the rehearsal, before it is opened.

Python tells its audit hooks of every file that it opens. What opens files by itself is asked here
first where it is known: ``torch.save`` and safetensors.
"""

import os
import stat
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.runtime.refusal import end_in_a_sentence

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Made again whenever they are missing, or held for a moment and never read.
_OF_NO_VALUE = (".pyc", ".lock")
# Module, function that writes, and the argument that is the file.
_OPENERS = (
    ("torch", "save", 1, "f"),
    ("safetensors.torch", "save_file", 1, "filename"),
    ("safetensors.numpy", "save_file", 1, "filename"),
)


class FileGuard:
    """Knows which files the rehearsal has made, over all its processes."""

    def __init__(self, order: RunOrder) -> None:
        self._made = str(order.made)
        self._refused = order.refused
        self._free = (str(order.folder), "/dev/", "/proc/", "/sys/")
        self._overwrites = order.overwrites
        self._asking = False

    def install(self) -> None:
        """Watch this process, for good: an audit hook cannot be taken back."""
        import sys

        sys.addaudithook(self._heard)
        for module, name, position, keyword in _OPENERS:
            if find_spec(module.partition(".")[0]) is not None:
                owner = import_module(module)
                setattr(owner, name, self._asked_first(getattr(owner, name), position, keyword))

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not self._asking and _is_writing(args):
            self.ask(args[0])

    def _asked_first(
        self, native: Callable[..., Any], position: int, keyword: str
    ) -> Callable[..., Any]:
        @wraps(native)
        def write(*args: Any, **kwargs: Any) -> Any:
            file = args[position] if len(args) > position else kwargs.get(keyword)
            if isinstance(file, str | os.PathLike):
                self.ask(file)
            return native(*args, **kwargs)

        return write

    def ask(self, file: Any) -> None:
        """End the job where the file was there before; note one that is about to be made."""
        if self._overwrites or not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path.startswith(self._free) or path.endswith(_OF_NO_VALUE):
            return
        self._asking = True
        try:
            if not _is_file(path):
                self._note(path)
            elif path not in self._noted():
                self._refuse(path)
        finally:
            self._asking = False

    def _note(self, path: str) -> None:
        with open(self._made, "a") as made:
            made.write(f"{path}\n")

    def _noted(self) -> set[str]:
        made = Path(self._made)
        return set(made.read_text().splitlines()) if made.exists() else set()

    def _refuse(self, path: str) -> None:
        self._refused.write_text(path)
        end_in_a_sentence(
            ConfigurationError(
                f"the script opens {path!r} for writing, which was there before the rehearsal: have"
                " it write elsewhere, or give --overwrite"
            )
        )


def _is_writing(args: tuple[Any, ...]) -> bool:
    """Of the arguments of an "open" event: path, mode, flags; mode is None for ``os.open``."""
    _, mode, flags = args
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & _WRITES)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
