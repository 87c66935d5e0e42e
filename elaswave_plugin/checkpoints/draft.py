"""A checkpoint in the making: a draft beside its place, which gets its name when it is whole.

A part of the job that was cut off and given up may not know it yet. It replaces nothing that the
part which goes on has published, wherever it stands still and however long:

- An attempt begins with drafts of its own, named after the number of its view: the folder of the
  checkpoint, and the small file that is to name it. Then all workers of the view meet.
- It publishes a draft by a rename, after they have met again, and after its worker has asked the
  lease: while that holds, no later view is decided.
- The attempt of a later view begins by taking the drafts of earlier views away, by a rename as
  well.

So what is published was begun before a later view was decided: the others met it, or its lease
held. The later attempt thus finds the drafts. Of the two renames of a draft the file system makes
one first: either the earlier attempt has published, and the later one publishes after it, or there
is nothing left to rename. Between question and rename no time is measured and no lock is held, and
a request that a cut network delivers late does no harm either. A file that claims a name would
leave a gap between its reading and the rename; a rename that never replaces would refuse a tag to
which a script saves again, and folders have no links.
"""

import contextlib
import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_DRAFT = ".part-"
# What an attempt has taken away of another one, to remove it.
_TAKEN = ".taken"
# In a draft: what had the name before it.
_FORMER = ".former"
# Of <fcntl.h> and <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
# What a file system answers that cannot exchange two names.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a checkpoint: a job has one at a time, in the view of this number."""

    launch_id: str
    epoch: int
    # Returns once this worker may act for its job; raises where it never will.
    ask: Callable[[], object]

    def draft_of(self, place: Path) -> Path:
        """Name the folder or file in which it writes what is to be ``place``."""
        return place.with_name(f"{place.name}{_DRAFT}{self.launch_id}-{self.epoch}")

    def may_take(self, place: Path, draft: Path) -> bool:
        """Tell whether a draft of ``place`` is of no later view of this launch of the job."""
        name = draft.name.removeprefix(place.name + _DRAFT).removesuffix(_TAKEN)
        launch_id, _, epoch = name.rpartition("-")
        return launch_id != self.launch_id or not epoch.isdigit() or int(epoch) <= self.epoch


def begin_draft(place: Path, attempt: Attempt) -> Path:
    """Make the empty folder in which one attempt writes the checkpoint of ``place``.

    No earlier attempt can publish it from here on, nor open a file of this one. Raises OSError.
    """
    draft = attempt.draft_of(place)
    _take_away(draft, place)
    # Before the others are looked for: a client of NFS reads a folder again once it has changed it.
    draft.mkdir(parents=True)
    _take_away_others(place, attempt)
    return draft


def begin_pointer(pointer: Path, attempt: Attempt) -> None:
    """Make the small file of one attempt that is to name the newest checkpoint, still empty.

    No earlier attempt can publish it from here on. Raises OSError.
    """
    draft = attempt.draft_of(pointer)
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.touch()
    _take_away_others(pointer, attempt)


def is_draft(folder: Path) -> bool:
    """Tell whether a folder is what an attempt left that did not come to its end."""
    return _DRAFT in folder.name


def discard_drafts(place: Path, attempt: Attempt) -> None:
    """Remove what this attempt and earlier ones left, and the folder where it is still empty."""
    _take_away(attempt.draft_of(place), place)
    _take_away_others(place, attempt)
    with contextlib.suppress(OSError):
        place.rmdir()


def publish(place: Path, attempt: Attempt) -> None:
    """Give a whole draft its name; what had the name is removed afterwards. Raises OSError.

    At no moment is there half a checkpoint in the place, and where the file system can exchange
    two names (all local ones on Linux), at no moment is there none. Elsewhere what had the name
    moves into the draft first, which it can only while that has not been taken away.
    """
    draft = attempt.draft_of(place)
    attempt.ask()
    try:
        draft.rename(place)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
    else:
        return
    former = draft
    if not _exchange(draft, place):
        place.rename(draft / _FORMER)
        draft.rename(place)
        former = place / _FORMER
    shutil.rmtree(former, ignore_errors=True)


@contextlib.contextmanager
def pointing_to(pointer: Path, attempt: Attempt) -> Iterator[TextIO]:
    """Open what ``begin_pointer`` has made; the file of the name changes in one step, at the end.

    Raises OSError, and leaves the file as it was where the writing fails.
    """
    draft = attempt.draft_of(pointer)
    try:
        # None is made here: a later attempt that has taken it away would not find it.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_TRUNC), "w") as file:
            yield file
        attempt.ask()
        draft.replace(pointer)
    finally:
        draft.unlink(missing_ok=True)


def _take_away_others(place: Path, attempt: Attempt) -> None:
    own = attempt.draft_of(place)
    for draft in sorted(place.parent.glob(f"{glob.escape(place.name)}{_DRAFT}*")):
        if draft != own and attempt.may_take(place, draft):
            _take_away(draft, place)


def _take_away(draft: Path, place: Path) -> None:
    """Leave nothing to rename under this name; its files may go one by one then.

    What cannot be removed afterwards costs room only. Raises OSError where the name stays.
    """
    taken = draft if draft.name.endswith(_TAKEN) else draft.with_name(draft.name + _TAKEN)
    if taken != draft:
        _remove(taken, place)
        with contextlib.suppress(FileNotFoundError):
            draft.rename(taken)
    _remove(taken, place)


def _remove(taken: Path, place: Path) -> None:
    """Remove what was taken away; a former checkpoint in it gets its name back if that is free."""
    with contextlib.suppress(OSError):
        (taken / _FORMER).rename(place)
    with contextlib.suppress(OSError):
        taken.unlink()
    shutil.rmtree(taken, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; false where the file system or the C library cannot.

    Raises OSError for anything else, as for a name that is not there any more.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
