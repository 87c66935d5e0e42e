"""The answers of a running job's supervisor to processes that want to join the job.

It lists the supervisors (`roster`) and passes on what its trainer had it remember (`kept`). It
holds the links of newcomers, and as the leader hands their requests to the agreement. Standard
library only.

Memory for newcomers: a trainer has its supervisor remember what the job fixed at its start. That is
alike on all workers, so every supervisor has it; a newcomer asks the one of the worker of rank 0.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from elaswave_plugin.core.agreement.join_rule import Applicant
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc.environment import RESERVE, Program
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.requests import in_loop
from elaswave_plugin.ipc.wire import Frame, send_frame
from elaswave_plugin.supervisor.peers.coordinator import Coordinator
from elaswave_plugin.supervisor.peers.same_program import describe_program

# What torchrun's variables, and ours, say of the job as a whole.
_OF_THE_JOB = (
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    RESERVE,
)
# A standby that has not asked for so long is gone.
_STANDBY_S = 2.0


class Reception:
    """The reception of one supervisor; all except `take_link` runs in the control thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        slot: int,
        program: Program,
        env: Mapping[str, str],
        run_dir: str | None,
        timeouts: Timeouts,
        heartbeat: Heartbeat,
        kept: Callable[[], dict[str, Any]],
    ) -> None:
        self._coordinator = coordinator
        self._agreement = coordinator.agreement
        self._slot = slot
        self._program = program
        self._of_the_job = {
            "env": {name: env[name] for name in _OF_THE_JOB if name in env},
            "run_dir": run_dir,
            "timeouts": asdict(timeouts),
            "heartbeat": asdict(heartbeat),
        }
        self._kept = kept
        self._standbys: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}

    def standbys(self) -> list[dict[str, Any]]:
        """List the idle supervisors that lately asked for an empty slot, by their own words."""
        now_s = time.monotonic()
        self._standbys = {
            key: known for key, known in self._standbys.items() if now_s - known[1] < _STANDBY_S
        }
        return [described for described, _ in self._standbys.values()]

    def answer_roster(self, request: Frame) -> Frame:
        """List the supervisors and the vacant slots, with what all supervisors were told.

        A standby describes itself in its request, and is noted.
        """
        standby = request.get("standby")
        if standby is not None:
            key = str(standby["machine"]), int(standby["pid"])
            self._standbys[key] = standby, time.monotonic()
        return {
            "t": "roster",
            "slot": self._slot,
            "leader": self._agreement.leader,
            "ranks": list(self._agreement.committed.ranks),
            "ending": self._agreement.ending,
            "started": self._agreement.started,
            "unused_node": self._agreement.unused_node,
            "told_to_leave": sorted(self._agreement.told_to_leave),
            "lost": sorted(self._coordinator.lost),
            "peers": list(self._coordinator.peers),
            "program": describe_program(self._program),
            **self._of_the_job,
        }

    def answer_kept(self, request: Frame) -> Frame:
        """Return what a trainer that builds alone cannot learn from the others."""
        return {"t": "kept", **self._kept()}

    def answer_admit(self, request: Frame) -> Frame:
        """Decide whether a newcomer is let in; newcomers ask the leader."""
        peer = from_json(Peer, request["peer"])
        for other in self._coordinator.peers:
            strangers = other.slot not in self._coordinator.lost and other.machine != peer.machine
            if strangers and other.node == peer.node:
                reason = f"node {peer.node} is another machine by now; join again"
                return {"t": "admit", "reason": reason, "later": False}
        verdict = self._agreement.admit(
            Applicant(
                slot=peer.slot,
                node=peer.node,
                address=peer.data,
                linked=frozenset(request["linked"]),
            )
        )
        return {"t": "admit", "reason": verdict.reason, "later": verdict.later}

    def hold_link(self, request: Frame, sock: socket.socket) -> Frame:
        """Keep the link of a newcomer until the leader has let it in."""
        self._coordinator.hold(from_json(Peer, request["peer"]), sock)
        return {"t": "linked"}


def take_link(
    reactor: Reactor, reception: Callable[[], Reception], request: Frame, sock: socket.socket
) -> None:
    """The same from a server's thread: the newcomer is told once the link is held."""

    def hold(frame: Frame) -> Frame:
        return reception().hold_link(frame, sock)

    answer = in_loop(reactor, hold)(request)
    # Where it has gone meanwhile, the reader of the link finds its end.
    with contextlib.suppress(OSError):
        send_frame(sock, answer)
