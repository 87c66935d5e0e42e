"""What the supervisors of a job know of each other (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What the others have to know of a supervisor; `machine` as `own_machine` has it."""

    slot: int
    node: int
    pid: int
    control: str
    data: str
    machine: str

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can carry."""
        return {
            "slot": self.slot,
            "node": self.node,
            "pid": self.pid,
            "control": self.control,
            "data": self.data,
            "machine": self.machine,
        }


def own_machine() -> str:
    """Equal for two processes that can see each other by process id, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
