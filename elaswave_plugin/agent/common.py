"""The things that the seats of an agent share with it, with each other and with the way in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elaswave_plugin.agent.agent_spec import AgentSpec
from elaswave_plugin.agent.keeper import Keeper
from elaswave_plugin.agent.peers.coordinator import Coordinator
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.ipc.job_constants import JobConstants
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Encoder
from elaswave_plugin.tracking.async_log import AsyncLog


@dataclass(slots=True, kw_only=True)
class Common:
    """The things that seats of an agent share; `agreement` and `coordinator` once it takes part.

    `constants`: what the job fixed at its start; `respawn`: how often a slot is started again;
    `took_s`: the longest time from the start of a trainer to where it needs the others;
    `exit_code`: set once the job is over here; `ballot`: of the newest proposal.
    """

    spec: AgentSpec
    reactor: Reactor
    keeper: Keeper
    store: SnapshotStore
    events: AsyncLog
    address: str
    on_change: Callable[[], None] = lambda: None
    on_idle: Callable[[], None] = lambda: None
    constants: JobConstants = field(default_factory=lambda: JobConstants(started_s=time.time()))
    respawn: int = 0
    exit_code: int | None = None
    completed: int = 0
    took_s: float = 0.0
    encode: Encoder = field(default_factory=Encoder)
    coordinator: Coordinator = field(init=False)

    @property
    def agreement(self) -> Agreement:
        """The agent's part in the agreement."""
        return self.coordinator.agreement

    @property
    def node(self) -> int:
        """The agent's node."""
        return self.spec.rendezvous.node
