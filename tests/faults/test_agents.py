"""The death of an agent costs nobody anything, in whatever phase, and whoever dies with it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest

from elaswave_plugin.config import RECOVERY_PHASES, STEP_PHASES
from tests.convoys import Convoy, convoys, recoveries, verdicts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# Worker 1 ends agents where it comes to a phase: those of these nodes, by their newest lives. All
# begin the step of a strike together, once others live in the place of those that were ended: else
# who dies in it may be a step ahead of worker 1.
STRIKE = """
import json, os, signal, time
import torch.distributed as dist
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.phases import Phases
begin, fire_phase, rest = GuardedSteps.begin, Phases.fire, {strikes}
steps = {{step for step, *_ in rest}}
def agents(events):
    lines = [json.loads(line) for line in open(events.path) if line.endswith("\\n")]
    ended = [pid for e in lines if e["kind"] == "agents_struck" for pid in e["pids"]]
    return {{e["node"]: e["pid"] for e in lines if e["kind"] == "agent_started"}}, ended
def are_replaced(events):
    newest, ended = agents(events)
    return not {{*newest.values()}} & {{*ended}}
def begin_when_replaced(self):
    begin(self)
    worker, deadline_s = self.worker, time.monotonic() + 60
    if worker.completed in steps:
        dist.barrier()
    worker.member.announce("a slow batch")
    try:
        while worker.completed in steps and not are_replaced(worker.events):
            worker.member.check()
            assert time.monotonic() < deadline_s, "no agent has taken the place of another"
            time.sleep(0.005)
    finally:
        worker.member.announce(None)
def strike(self, phase):
    if self._slot == 1 and rest and self.step >= rest[0][0] and phase == rest[0][1]:
        _, _, nodes, name = rest.pop(0)
        pids = [agents(self._events)[0][node] for node in nodes]
        self._events.emit("agents_struck", fault=name, step=self.step, pids=pids)
        for pid in pids:
            os.kill(pid, signal.{how})
    fire_phase(self, phase)
GuardedSteps.begin, Phases.fire = begin_when_replaced, strike
"""


@dataclass(frozen=True, slots=True)
class Strike:
    """The agents of these nodes are ended in a phase, and a worker in this step, if there is one.

    ``step``: where the worker dies, else the first one that has such a strike.
    """

    nodes: tuple[int, ...]
    step: int
    phase: str
    worker: int | None = None

    def __str__(self) -> str:
        beside = "" if self.worker is None else f"+{self.kill}"
        return f"agents{','.join(map(str, self.nodes))}@{self.step}:{self.phase}{beside}"

    @property
    def kill(self) -> str:
        """The worker's death."""
        return f"{self.worker}@{self.step}:backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec(JobSpec):
    """A job with such strikes; ``how``: the signal."""

    how: str = "SIGKILL"

    def struck_by(self, faults: Sequence[Any]) -> Self:
        """The same job with these strikes."""
        told = [(one.step, one.phase, one.nodes, str(one)) for one in faults]
        return replace(
            self,
            strikes=tuple(faults),
            kills=tuple(one.kill for one in faults if one.worker is not None),
            sabotage=STRIKE.format(strikes=told, how=self.how),
        )


JOBS = {
    "one node": AgentSpec(steps=9),
    "two nodes": AgentSpec(steps=9, nodes=2),
    "four nodes": AgentSpec(steps=9, nodes=4),
    "tp2 pp2 dp2": AgentSpec(nproc=8, options=TP2_PP2_DP2.options, nodes=2, steps=9),
}


def alike(spec: AgentSpec) -> JobSpec:
    """The job that it is compared with: what is on how many nodes changes no bit."""
    return JobSpec(nproc=spec.nproc, options=spec.options, steps=spec.steps)


def struck_in(run: Outcome) -> dict[str, int]:
    """By strike, the first step that may differ behind it."""
    workers = recoveries(run)
    found = {}
    for event in run.events("agents_struck"):
        (strike,) = (one for one in run.spec.faults if str(one) == event["fault"])
        if strike.worker is None:
            found[str(strike)] = event["step"]
        elif strike.kill in workers:
            found[str(strike)] = min(one["restored_step"] for one in workers[strike.kill])
    return found


def check_agents(run: Outcome, reference: Outcome) -> None:
    """All strikes struck once, and each agent has lived so often, or is about to."""
    check_equal(run, reference)
    names = [event["fault"] for event in run.events("agents_struck")]
    assert names == [str(strike) for strike in run.spec.faults]
    lives = dict.fromkeys(range(run.spec.nodes), 0)
    for event in run.events("agent_started"):
        lives[event["node"]] = max(lives[event["node"]], event["life"])
    ended = [node for strike in run.spec.faults for node in strike.nodes]
    assert lives == {node: ended.count(node) for node in lives}, run.output[-3000:]
    lost = {strike.worker for strike in run.spec.faults}
    ranks = run.events("view_committed")[-1]["ranks"]
    assert ranks == [slot for slot in range(run.spec.nproc) if slot not in lost]


def check_alone(run: Outcome, reference: Outcome) -> None:
    """Nothing but that happened."""
    check_agents(run, reference)
    assert len(run.events("view_committed")) == 1, run.output[-3000:]


def nodes_of(job: str) -> list[list[int]]:
    """The agents that die: the leader's, another one, all at once."""
    several = JOBS[job].nodes > 1
    return [[0], *([[1], list(range(JOBS[job].nodes))] if several else [])]


ALONE = [(job, nodes, phase) for job in JOBS for nodes in nodes_of(job) for phase in STEP_PHASES]
BESIDE = [
    (job, nodes, phase)
    for job in JOBS
    for nodes in nodes_of(job)
    for phase in (*RECOVERY_PHASES, "backward")
]


def alone(job: str, nodes: list[int], phase: str) -> AgentSpec:
    """The job with one strike."""
    return JOBS[job].struck_by([Strike(tuple(nodes), 2, phase)])


def beside(job: str, nodes: list[int], phase: str) -> AgentSpec:
    """The job with one strike beside the death of a worker; of each node one is left."""
    place = BESIDE.index((job, nodes, phase)) % 2
    worker = (2, JOBS[job].nproc - 2)[place] if JOBS[job].nproc > 4 else (2, 0)[place]
    return JOBS[job].struck_by([Strike(tuple(nodes), 3, phase, worker)])


# With five deaths of an agent within seconds its guardian ends its node.
@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(("job", "nodes", "phase"), convoys(ALONE, alone, most=4, victim=str))
def test_agents_that_die_in_a_step_change_nothing(
    convoy: Convoy, reference: Reference, job: str, nodes: list[int], phase: str
) -> None:
    undisturbed = reference(alike(JOBS[job]))
    convoy.check(
        undisturbed.trace(),
        lambda: check_alone(convoy.run, undisturbed),
        struck=struck_in(convoy.run),
    )


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(
    ("job", "nodes", "phase"),
    convoys(BESIDE, beside, most=2, victim=lambda strike: strike.worker),
)
def test_agents_that_die_beside_a_worker_cost_no_more_than_its_step(
    convoy: Convoy, reference: Reference, job: str, nodes: list[int], phase: str
) -> None:
    """Before, while, or after the others recover from the worker's loss."""
    undisturbed = reference(alike(JOBS[job]))
    convoy.check(
        undisturbed.trace(),
        lambda: check_agents(convoy.run, undisturbed),
        struck=struck_in(convoy.run),
    )


# A running stream behind the strike that leaves one for later.
FORGETS = """
from elaswave_plugin.adapters.megatron.compat import rng
def forget(self, phase):
    strike(self, phase)
    if len(rest) == 1:
        rng.set_key = lambda *k, **size: None
Phases.fire = forget
"""


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_the_strike_of_a_convoy_that_breaks_it_is_named(run: Launch, reference: Reference) -> None:
    strikes = [Strike((0,), 2, "gather"), Strike((1,), 3, "data"), Strike((0, 1), 4, "data")]
    spec = JOBS["two nodes"].struck_by(strikes)
    broken = run(replace(spec, sabotage=spec.sabotage + FORGETS))
    undisturbed = reference(alike(spec))
    found = verdicts(
        broken,
        lambda one: one.check(
            undisturbed.trace(),
            lambda: check_alone(broken, undisturbed),
            struck=struck_in(broken),
        ),
    )
    assert found == ["passes", "fails", "not run"]


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize("job", ["one node", "two nodes"])
def test_an_agent_that_is_stopped_is_followed_by_another(
    run: Launch, reference: Reference, job: str
) -> None:
    job_of_sixty = replace(JOBS[job], steps=60, dump="last", how="SIGSTOP")
    survived = run(job_of_sixty.struck_by([Strike((0,), 3, "backward")]))
    check_alone(survived, reference(replace(alike(job_of_sixty), dump="last")))


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(
    ("job", "phase"), sampled(itertools.product(JOBS, ("data", "backward", "snapshot")))
)
def test_an_agent_dies_and_its_node_takes_a_worker_back(
    run: Launch, reference: Reference, job: str, phase: str
) -> None:
    """The next life starts the trainer again that the last one had not."""
    base = replace(JOBS[job], steps=10)
    spec = base.struck_by([Strike((2 * base.nodes // base.nproc,), 3, phase)])
    survived = run(replace(spec, kills=("2@3:backward",), respawn=10, awaits=((6, 1),)))
    check_equal(survived, reference(alike(base)))
    assert len(survived.events("agents_struck")) == 1
    assert survived.events("view_committed")[-1]["ranks"] == list(range(base.nproc))
