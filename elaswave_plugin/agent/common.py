"""The things that the seats of an agent share with it, with each other and with the way in."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elaswave_plugin.agent.keeper import Keeper
from elaswave_plugin.agent.peers.coordinator import Coordinator
from elaswave_plugin.agent.peers.job_place import JobPlace
from elaswave_plugin.agent.peers.rendezvous import RendezvousSpec
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.frames import JobConstants
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Encoder
from elaswave_plugin.tracking.events import AsyncLog


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """Everything an agent is told when it starts; at `host` the others reach this machine.

    `envs`: the environment of the trainer in each place of this node; the first places have the
    slots of the launch, `standby` more wait for slots that are lost elsewhere. `first_args`: what a
    launcher adds before the script's arguments in each place. `joins`: agents of a running job
    ("host:port") in which the places take `wanted` slots, if they are free. `job_place`: where a
    job of one name is known, of which this is the life `job_life`.
    """

    rendezvous: RendezvousSpec
    host: str
    program: Program
    envs: tuple[Mapping[str, str], ...]
    first_args: tuple[tuple[str, ...], ...] = ()
    standby: int = 0
    run_dir: str | None = None
    notice_file: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    joins: tuple[str, ...] = ()
    wanted: tuple[int, ...] = ()
    job_place: JobPlace | None = None
    job_life: int = 0

    def program_in(self, place: int) -> Program:
        """The program with the arguments that it has in a place."""
        first = self.first_args[place] if self.first_args else ()
        return replace(self.program, args=(*first, *self.program.args))


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
