"""How much memory this process may still take: the machine's, or less in a container."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The least of what the machine has and what each visible control group (version 2) leaves."""
    found = [int(psutil.virtual_memory().available)]
    for line in own.read_text().splitlines() if own.exists() else []:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            group = groups / path.lstrip("/")
            inside = [one for one in (group, *group.parents) if one.is_relative_to(groups)]
            found += [left for one in inside if (left := _left_bytes(one)) is not None]
    return min(found)


def _left_bytes(group: Path) -> int | None:
    """What a group may take beyond what it has; cached files that nobody uses would go first."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no group of this version, or one that may not be looked into
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
