"""The answers of a running job's agent to processes that want to join the job.

It tells what the job is like (`roster`), passes on what its trainers had it remember (`kept`), and
as the leader hands requests for slots to the agreement. Standard library only.

Memory for newcomers: a trainer has its agent remember what the job fixed at its start. That is
alike on all workers, so every agent has it.
"""

from dataclasses import asdict

from elaswave_plugin.agent.common import Common
from elaswave_plugin.agent.peers.same_program import describe_program
from elaswave_plugin.core.agreement.quorum import Applicant
from elaswave_plugin.core.layout.reserve import vacant
from elaswave_plugin.ipc.environment import RESERVE
from elaswave_plugin.ipc.wire import Frame

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


class Reception:
    """The reception of one agent; all of it runs in the control thread."""

    def __init__(self, common: Common) -> None:
        self._common = common
        spec = common.spec
        env = spec.envs[0] if spec.envs else {}
        self._of_the_job = {
            "env": {name: env[name] for name in _OF_THE_JOB if name in env},
            "run_dir": spec.run_dir,
            "timeouts": asdict(spec.timeouts),
            "heartbeat": asdict(spec.heartbeat),
            "program": describe_program(spec.program),
            "job_place": asdict(spec.job_place) if spec.job_place else None,
            "job_life": spec.job_life,
        }

    def answer_roster(self, request: Frame) -> Frame:
        """List the nodes and the slots that are free, with what all agents were told."""
        agreement = self._common.agreement
        nodes = agreement.nodes
        told_to_leave = sorted(agreement.told_to_leave - nodes.without_agent.keys())
        return {
            "t": "roster",
            "node": agreement.node,
            "leader": agreement.leader,
            "ranks": list(agreement.committed.ranks),
            "ending": agreement.ending,
            "started": agreement.started,
            "unused_node": nodes.unused_node,
            "told_to_leave": told_to_leave,
            "nodes": list(nodes.of_slots),
            "free": list(nodes.without_agent),
            "vacant": list(vacant(nodes.of_slots)),
            "addresses": {str(n): one for n, one in agreement.addresses.items() if nodes.lives(n)},
            **self._of_the_job,
        }

    def answer_kept(self, request: Frame) -> Frame:
        """Return what a trainer that builds alone cannot learn from the others."""
        common = self._common
        return {"t": "kept", "job_constants": common.constants, "respawn": common.respawn}

    def answer_admit(self, request: Frame) -> Frame:
        """Decide whether a node is given slots; nodes ask the leader."""
        applicant = Applicant(
            node=int(request["node"]),
            slots=tuple(map(int, request["slots"])),
            address=str(request["address"]),
        )
        verdict = self._common.agreement.admit(applicant)
        return {"t": "admit", "reason": verdict.reason, "later": verdict.later}
