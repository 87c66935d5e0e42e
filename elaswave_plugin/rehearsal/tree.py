"""The changes under a folder between two looks at it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_SKIPPED = ("__pycache__", ".git")
Look = Mapping[str, tuple[int, int, int]]


def look_at(folder: Path) -> Look:
    """Inode, size and time of change of each file, by its path from the folder."""
    return dict(_files(str(folder), ""))


def _files(folder: str, name: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    try:
        entries = list(os.scandir(os.path.join(folder, name)))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(name, entry.name)
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED:
                yield from _files(folder, path)
        elif entry.is_file(follow_symlinks=False):
            found = entry.stat(follow_symlinks=False)
            yield path, (found.st_ino, found.st_size, found.st_mtime_ns)


def changed(before: Look, after: Look) -> list[str]:
    """Files that are new, gone or other than they were, in order."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
