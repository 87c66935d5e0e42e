"""The count of processes that the kernel has ended for lack of memory (standard library only)."""

from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


def oom_kills(groups: Path = _GROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> int:
    """Count those of the whole machine, or of the own control group where that counts more.

    Of version 1 or 2; 0 where nothing is counted.
    """
    files = [machine]
    for line in own.read_text().splitlines() if own.exists() else []:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            files += [groups / path.lstrip("/") / "memory.events", groups / "memory.events"]
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            files += [root / path.lstrip("/") / "memory.oom_control", root / "memory.oom_control"]
    return max(map(_counted, files))


def _counted(file: Path) -> int:
    try:
        lines = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return int(lines.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
