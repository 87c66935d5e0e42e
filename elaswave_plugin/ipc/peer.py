"""The facts that the supervisors of a job know of each other (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The facts of a supervisor that the others need; `machine` as `own_machine` has it."""

    slot: int
    node: int
    pid: int
    control: str
    data: str
    machine: str


def near_name(address: str) -> str:
    """Return the name of the Unix socket that a supervisor has beside its data address."""
    return f"\0elaswave supervisor {address}"


def own_machine() -> str:
    """Return what is equal for two processes that see each other by process id, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
