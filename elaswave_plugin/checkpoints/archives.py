"""Looks at a file that torch.save wrote, without reading its tensors: its end, and what it says."""

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any


def archive_flaw(file: Path) -> str | None:
    """Say what is wrong with a file, naming it; None where it is as written.

    torch.save writes a zip archive, whose directory of contents comes last: a file that was cut
    has none.
    """
    try:
        outline(file)
    except (OSError, zipfile.BadZipFile) as error:
        return f"{file} ({file.stat().st_size} bytes) was not written to its end: {error}"
    except Exception as error:  # a damaged pickle may raise anything
        return f"{file} cannot be read: {type(error).__name__}: {error}"
    return None


def outline(file: Path) -> dict[Any, Any]:
    """Return what a file holds, of its dicts, lists and numbers; all else in it is opaque.

    No class or function that it names is called, and no tensor read. Empty for a file that holds
    no dict. Raises OSError, and whatever a pickle that is none may raise.
    """
    with zipfile.ZipFile(file) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/data.pkl")]
        found = _Outline(io.BytesIO(archive.read(name))).load()
    return found if isinstance(found, dict) else {}


class _Opaque:
    """Stand-in for all that a class or a function of a pickle would have made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""

    def __call__(self, *args: Any, **kwargs: Any) -> "_Opaque":
        """Take anything."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Take anything."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take anything."""

    def append(self, value: Any) -> None:
        """Take anything."""


class _Outline(pickle.Unpickler):
    """Reads a pickle and builds nothing that has code of its own."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or a function."""
        plain = {("collections", "OrderedDict"): OrderedDict, ("argparse", "Namespace"): Namespace}
        return plain.get((module, name), _Opaque)

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for the data of a tensor."""
        return None
