"""The settings that an agent is given when it starts (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaswave_plugin.agent.peers.job_place import JobPlace
from elaswave_plugin.agent.peers.rendezvous import RendezvousSpec
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.ipc.environment import Program


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
