"""The settings that a supervisor is given when it starts (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.supervisor.peers.rendezvous import RendezvousSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """Everything a supervisor is told when it starts; at `host` the others reach this machine.

    `joins`: supervisors of a running job ("host:port") in which it takes the place of a lost one.
    """

    rendezvous: RendezvousSpec
    host: str
    program: Program
    env: Mapping[str, str]
    run_dir: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    joins: tuple[str, ...] = ()
