"""A checkpoint in the making: a folder beside its place, which gets its name when it is whole."""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_DRAFT = ".part-"
_FORMER = ".former"
# Of <fcntl.h> and <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def begin_draft(place: Path, attempt: str) -> Path:
    """Make the empty folder in which one attempt writes the checkpoint of ``place``.

    ``attempt`` names it, so that a writer of an earlier attempt can never open a file of this one.
    What earlier attempts left is removed. Raises OSError.
    """
    discard_drafts(place)
    draft = draft_of(place, attempt)
    draft.mkdir(parents=True)
    return draft


def draft_of(place: Path, attempt: str) -> Path:
    """Name the folder in which an attempt writes."""
    return place.with_name(f"{place.name}{_DRAFT}{attempt}")


def is_draft(folder: Path) -> bool:
    """Tell whether a folder is what an attempt left that did not come to its end."""
    return _DRAFT in folder.name or folder.name.endswith(_FORMER)


def discard_drafts(place: Path) -> None:
    """Remove what attempts left beside ``place``, and the place where it is still empty.

    A leftover that cannot be removed costs room only, so it is no reason to fail.
    """
    for draft in _drafts(place):
        shutil.rmtree(draft, ignore_errors=True)
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()


def publish(draft: Path, place: Path) -> None:
    """Give a whole draft its name; what had the name is removed afterwards. Raises OSError.

    At no moment is there half a checkpoint in the place, and where the file system can exchange
    two names (all local ones on Linux), at no moment is there none.
    """
    if not (place.is_dir() and any(place.iterdir())):
        draft.rename(place)
        return
    if _exchange(draft, place):
        shutil.rmtree(draft)
        return
    former = place.with_name(place.name + _FORMER)
    if former.exists():
        shutil.rmtree(former)
    place.rename(former)
    draft.rename(place)
    shutil.rmtree(former)


@contextlib.contextmanager
def pointing_to(pointer: Path) -> Iterator[TextIO]:
    """Open the small file that names the newest checkpoint; it changes in one step, at the end.

    Raises OSError, and leaves the file as it was where the writing fails.
    """
    fresh = pointer.with_name(pointer.name + ".part")
    try:
        with fresh.open("w") as file:
            yield file
        fresh.replace(pointer)
    finally:
        fresh.unlink(missing_ok=True)


def _drafts(place: Path) -> Iterator[Path]:
    if place.parent.is_dir():
        found = [p for p in place.parent.iterdir() if p.name.startswith(place.name + _DRAFT)]
        yield from sorted(found)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; false where the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
