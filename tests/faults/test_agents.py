"""The death of an agent costs nobody anything, in whatever phase, and whoever dies with it."""

import itertools
from dataclasses import replace

import pytest

from elaswave_plugin.config import RECOVERY_PHASES, STEP_PHASES
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# A worker ends agents where it comes to a phase: those of these nodes, by their newest lives.
STRIKE = """
import json, os, signal
from elaswave_plugin.recovery.phases import Phases
fire_phase, struck = Phases.fire, []
def strike(self, phase):
    if (self._slot, phase) == ({slot}, {phase!r}) and self.step >= 3 and not struck:
        struck.append(True)
        lines = open(self._events.path).read().splitlines()
        agents = {{e["node"]: e["pid"] for e in map(json.loads, lines)
                  if e["kind"] == "agent_started"}}
        self._events.emit("agents_struck", nodes={nodes}, step=self.step, phase=phase)
        for node in {nodes}:
            os.kill(agents[node], signal.{how})
    fire_phase(self, phase)
Phases.fire = strike
"""
JOBS = {
    "one node": JobSpec(steps=8),
    "two nodes": JobSpec(steps=8, nodes=2),
    "four nodes": JobSpec(steps=8, nodes=4),
    "tp2 pp2 dp2": replace(TP2_PP2_DP2, nodes=2, steps=8),
}


def struck(spec: JobSpec, phase: str, nodes: list[int], *, how: str = "SIGKILL") -> JobSpec:
    """The job with agents that are ended in a phase that worker 1 comes to."""
    return replace(spec, sabotage=STRIKE.format(slot=1, phase=phase, nodes=nodes, how=how))


def check(run: Outcome, reference: Outcome, *, nodes: list[int], views: int) -> None:
    """They died, others came, and nothing else happened."""
    check_equal(run, reference)
    assert len(run.events("agents_struck")) == 1
    lives = dict.fromkeys(range(run.spec.nodes), 0)
    for event in run.events("agent_started"):
        lives[event["node"]] = max(lives[event["node"]], event["life"])
    assert lives == {node: int(node in nodes) for node in range(run.spec.nodes)}
    assert len(run.events("view_committed")) == views, run.output[-3000:]


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


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(("job", "nodes", "phase"), sampled(ALONE))
def test_agents_that_die_in_a_step_change_nothing(
    run: Launch, reference: Reference, job: str, nodes: list[int], phase: str
) -> None:
    survived = run(struck(JOBS[job], phase, nodes))
    check(survived, reference(JOBS[job]), nodes=nodes, views=1)


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(("job", "nodes", "phase"), sampled(BESIDE))
def test_agents_that_die_beside_a_worker_cost_no_more_than_its_step(
    run: Launch, reference: Reference, job: str, nodes: list[int], phase: str
) -> None:
    """Before, while, or after the others recover from the worker's loss."""
    spec = replace(struck(JOBS[job], phase, nodes), kills=("2@3:backward",))
    survived = run(spec)
    check_equal(survived, reference(JOBS[job]))
    assert len(survived.events("agents_struck")) == 1
    started = {(one["node"], one["life"]) for one in survived.events("agent_started")}
    assert {(node, 1) for node in nodes} <= started
    ranks = survived.events("view_committed")[-1]["ranks"]
    assert ranks == [slot for slot in range(survived.spec.nproc) if slot != 2]


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize("job", ["one node", "two nodes"])
def test_an_agent_that_is_stopped_is_followed_by_another(
    run: Launch, reference: Reference, job: str
) -> None:
    spec = struck(replace(JOBS[job], steps=60, dump="last"), "backward", [0], how="SIGSTOP")
    survived = run(spec)
    check(survived, reference(replace(spec, sabotage="")), nodes=[0], views=1)


@proves(Kind.AGENT, Promise.EQUAL)
@pytest.mark.parametrize(
    ("job", "phase"), sampled(itertools.product(JOBS, ("data", "backward", "snapshot")))
)
def test_an_agent_dies_and_its_node_takes_a_worker_back(
    run: Launch, reference: Reference, job: str, phase: str
) -> None:
    """The next life starts the trainer again that the last one had not."""
    base = replace(JOBS[job], steps=10, respawn=10)
    spec = replace(struck(base, phase, [2 * base.nodes // base.nproc]), kills=("2@3:backward",))
    survived = run(replace(spec, awaits=((6, 1),)))
    check_equal(survived, reference(replace(base, respawn=0)))
    assert survived.events("view_committed")[-1]["ranks"] == list(range(base.nproc))
