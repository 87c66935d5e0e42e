"""The memory that this process may still take: the machine's, or less in a container."""

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY = "memory"
# No limit, in version 1: the largest number of whole pages.
_MOST_BYTES = 1 << 62


# The files of a control group: its limit, what it has, and the cached files in that.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_Names = tuple[str, str, str]


def available_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The least of what the machine has and what each visible control group leaves."""
    found = [int(psutil.virtual_memory().available)]
    for line in own.read_text().splitlines() if own.exists() else []:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            found += _left_within(groups, path, _VERSION_2)
        elif _MEMORY in controllers.split(","):
            found += _left_within(groups / _MEMORY, path, _VERSION_1)
    return min(found)


def _left_within(root: Path, path: str, names: _Names) -> list[int]:
    """Of the group at ``path`` and those around it; in a container the innermost is the root."""
    group = root / path.lstrip("/")
    inside = [one for one in (group, *group.parents) if one.is_relative_to(root)]
    return [left for one in inside if (left := _left_bytes(one, names)) is not None]


def _left_bytes(group: Path, names: _Names) -> int | None:
    """Return the bytes that a group may still take; unused cached files count, as they go first."""
    limit_file, used_file, cached = names
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no group of this version, or one that may not be looked into
    if limit == "max" or int(limit) >= _MOST_BYTES:
        return None
    return max(0, int(limit) - used + int(stat.get(cached, 0)))
