"""Refuses what would change a file that was there before the rehearsal; takes away what is new.

Python tells its audit hooks of every file that it opens, removes or renames. What opens files by
itself is asked here first where it is known: ``torch.save`` and safetensors.
"""

import builtins
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.trainer.fatal import end_in_a_sentence

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Made again whenever they are missing, or held for a moment and never read.
_OF_NO_VALUE = (".pyc", ".lock")
# Caches of libraries, which hold no results: variable that names one, and where it is without that.
_CACHES = (
    ("XDG_CACHE_HOME", "~/.cache"),
    ("HF_HOME", None),
    ("TORCH_EXTENSIONS_DIR", None),
    ("TORCHINDUCTOR_CACHE_DIR", None),
    ("TRITON_CACHE_DIR", "~/.triton"),
)
# Before a path that was there, in the list of those that were made: it may be removed and made.
_WAS_THERE = "-"
# What may be done to a folder that is there, and to what is no file.
_MAKES = ("opens for writing", "makes")
# Event -> the paths among its arguments: where each is, where its folder's descriptor is, and what
# is done.
_CHANGES: tuple[tuple[str, tuple[tuple[int, int | None, str], ...]], ...] = (
    ("os.mkdir", ((0, 2, "makes"),)),
    ("os.remove", ((0, 1, "removes"),)),
    ("os.rmdir", ((0, 1, "removes"),)),
    ("shutil.rmtree", ((0, 1, "removes"),)),
    ("os.rename", ((0, 2, "renames"), (1, 3, "replaces"))),
    ("os.truncate", ((0, None, "cuts"),)),
)
# Module, function that writes, and the argument that is the file. Of safetensors it is what its own
# functions call, which others have imported by name.
_OPENERS = (
    ("torch", "save", 1, "f"),
    ("safetensors.torch", "serialize_file", 1, "filename"),
    ("safetensors.numpy", "serialize_file", 1, "filename"),
)


def begin(path: str) -> None:
    """The script of this process is about to run, in the rehearsal's run that ``path`` orders."""
    order = RunOrder.read(Path(path))
    switch_off_trackers(order.saves)
    FileGuard(order).install()


OFF = (("wandb", "off"), ("wandb_project", "elaswave"), ("tensorboard", None))
"""The job's own settings in a rehearsal."""

_WANDB = (("WANDB_MODE", "disabled"), ("WANDB_SILENT", "true"))
_WRITER = "tensorboard.summary.writer.event_file_writer"


class FileGuard:
    """Knows which files the rehearsal has made, over all its processes."""

    def __init__(self, order: RunOrder) -> None:
        self._made = str(order.made)
        self._refused = order.refused
        # What a zygote has made by `tempfile`, each trainer that it forks removes at its end.
        temporary = os.path.join(tempfile.gettempdir(), tempfile.gettempprefix())
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor_")
        mine = (str(order.folder), temporary, inductor)
        self._free = (*mine, "/dev/", "/proc/", "/sys/", *_caches())
        self._overwrites = order.overwrites
        self._changes = dict(_CHANGES)
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
        if self._asking:
            return
        if event == "open" and is_writing(args[2] if args[1] is None else args[1]):
            self.ask(args[0])
        for path, folder, verb in self._changes.get(event, ()):
            self.ask(_placed(args[path], None if folder is None else args[folder]), verb)

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

    def ask(self, file: Any, verb: str = "opens for writing") -> None:
        """End the job where the path was there before; note one that is about to be made."""
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path.startswith(self._free) or path.endswith(_OF_NO_VALUE):
            return
        self._asking = True
        try:
            if not os.path.lexists(path):
                self._note(path)
            elif verb in _MAKES and not _is_file(path):
                return  # a folder that is there, a terminal, a pipe
            elif self._was_made(path):
                return
            elif self._overwrites:
                self._note(_WAS_THERE + path)
            else:
                self._refuse(path, verb)
        finally:
            self._asking = False

    def _note(self, path: str) -> None:
        with open(self._made, "a") as made:
            made.write(f"{path}\n")

    def _was_made(self, path: str) -> bool:
        return not {path, *map(str, Path(path).parents)}.isdisjoint(_noted(Path(self._made)))

    def _refuse(self, path: str, verb: str) -> None:
        said = (
            f"the script {verb} {path!r}, which was there before the rehearsal, and this was not"
            " done: have it write elsewhere, or give --overwrite"
        )
        self._refused.write_text(said)
        end_in_a_sentence(ConfigurationError(said))


def take_away(order: RunOrder) -> None:
    """Remove what a run has made, so that the next one finds what this one found."""
    noted = _noted(order.made)
    for path in noted:
        if _WAS_THERE + path in noted or path.startswith(_WAS_THERE):
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
    order.made.unlink(missing_ok=True)


def _noted(made: Path) -> list[str]:
    return made.read_text().splitlines() if made.exists() else []


def _caches() -> Iterator[str]:
    here = os.getcwd()
    for name, usual in _CACHES:
        folder = os.environ.get(name) or usual
        if folder is not None:
            path = os.path.abspath(os.path.expanduser(folder))
            if not here.startswith(path):
                yield path


def _placed(path: Any, folder: int | None) -> Any:
    """The path from the folder of a descriptor; -1 or none is the working directory."""
    if folder in (-1, None) or not isinstance(path, str | bytes | os.PathLike):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


def is_writing(how: str | int) -> bool:
    """Return whether a file is opened for writing, by a mode or by flags."""
    if isinstance(how, int):
        return bool(how & _WRITES)
    return any(letter in how for letter in "wax+")


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def switch_off_trackers(folder: Path) -> None:
    """W&B logs nowhere; what writes event files of TensorBoard does so below ``folder``."""
    os.environ.update(_WANDB)
    if find_spec("tensorboard") is None:
        return
    writer: Any = import_module(_WRITER).EventFileWriter
    native = writer.__init__

    @wraps(native)
    def init(self: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
        elsewhere = folder / "tensorboard" / str(os.path.abspath(logdir)).lstrip("/")
        native(self, str(elsewhere), *args, **kwargs)

    writer.__init__ = init


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
    """The saves of one process, below ``folder``; what is below ``free`` already stays there.

    While a save runs, Python's own calls that make a path, open it for writing or rename to it do
    so below that folder, and those that read or remove find there what was written before.
    """

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
