"""The changes under a folder between two looks at it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SKIPPED = ("__pycache__", ".git")
Look = Mapping[str, tuple[int, int, int]]


def look_at(folder: Path) -> Look:
    """Inode, size and time of change of each file, by its path from the folder."""
    look: dict[str, tuple[int, int, int]] = {}
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for path in (os.path.join(where, name) for name in files):
            with suppress(OSError):
                found = os.lstat(path)
                look[os.path.relpath(path, folder)] = found.st_ino, found.st_size, found.st_mtime_ns
    return look


def changed(before: Look, after: Look) -> list[str]:
    """Files that are new, gone or other than they were, in order."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
