"""Many nodes of eight light trainers, all real processes: worker, agent and node are lost."""

from pathlib import Path

import pytest

from tests.agent.jobs import Job
from tests.proofs import Kind, Promise, proves

WIDTH = 8


@proves(Kind.NODE, Promise.GOES_ON)
@pytest.mark.parametrize("nodes", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_many_nodes_lose_a_worker_an_agent_and_a_node(tmp_path: Path, nodes: int) -> None:
    """Each loss costs one view, and the agent's none; the leader's own agent is among them."""
    last, victim = nodes - 1, WIDTH * (nodes // 2) + 3
    # On two cores so many processes wait for their turn; nothing here is told by silence alone.
    with Job(tmp_path, WIDTH * nodes, "--heartbeat-timeout-s=15").start(nodes=nodes) as job:
        job.kill(victim)
        rest = [slot for slot in range(WIDTH * nodes) if slot != victim]
        assert {len(one["ranks"]) for one in job.all("commit", rest, epoch=2)} == {len(rest)}
        job.kill_agent(0, WIDTH)
        job.next_agent(0, 1), job.next_agent(1, 1)
        job.kill_node(last)
        rest = [slot for slot in rest if slot // WIDTH != last]
        commits = job.all("commit", rest, epoch=3)
        assert {tuple(one["ranks"]) for one in commits} == {tuple(rest)}
        assert job.finish(rest) == 0
        assert [job.code(node) for node in range(last)] == [0] * last
        assert job.left(job.wait_s) == []
    assert {(one["node"], one["life"]) for one in job.events("agent_started") if one["life"]} == {
        (0, 1),
        (1, 1),
    }
