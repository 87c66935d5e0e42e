"""The way of a trainer to the agent of its node, by what it inherits (standard library only)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from elaswave_plugin.core.agreement.messages import Detached
from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.ipc.environment import AGENT, INCARNATION, JOB_SECRET_FD, SLOT
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.trainer.control_link import Dial, dial_agent, say_once

_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class AgentContact:
    """The address of the agent, the job's secret, and the worker that this process is.

    No variable of the environment has the secret: what a trainer starts would inherit it.
    """

    address: str
    secret: Secret
    slot: int
    incarnation: int
    pid: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> AgentContact:
        """Read what the guardian has given; raises OSError, KeyError where this is no trainer."""
        return cls(
            address=env[AGENT],
            secret=Secret(os.pread(int(env[JOB_SECRET_FD]), _MOST_BYTES, 0)),
            slot=int(env[SLOT]),
            incarnation=int(env[INCARNATION]),
            pid=os.getpid(),
        )

    @property
    def dial(self) -> Dial:
        """The call that opens the control link."""
        return partial(dial_agent, self.address, self.secret, self.slot, self.incarnation)

    def say(self, message: WireMessage) -> bool:
        """Say something beside the control link; returns whether the agent has heard it.

        It hears nothing from a child of the trainer.
        """
        if os.getpid() != self.pid:
            return False
        return say_once(self.address, self.secret, self.slot, self.incarnation, message)

    def say_detached(self, *, trains: bool, missing: str) -> bool:
        """Say that the trainer works, or has ended, without having joined the job."""
        return self.say(Detached(slot=self.slot, trains=trains, missing=missing))
