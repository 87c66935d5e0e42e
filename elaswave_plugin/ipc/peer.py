"""The facts that the agents of a job know of each other (standard library only)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The agent of a node: its process, the ``life`` that it is, and where it answers."""

    node: int
    pid: int
    life: int
    data: str


def near_name(address: str) -> str:
    """Return the name of the Unix socket that an agent has beside its data address."""
    return f"\0elaswave agent {address}"
