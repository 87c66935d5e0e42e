"""Each node's log says where the job answers, what becomes of it, and who could take over."""

from pathlib import Path

from elaswave_plugin.agent.peers.job_summary import words_of_view
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.core.agreement.view import MembershipView
from tests.agent.jobs import Job


def test_each_node_is_told_of_a_loss_a_drain_and_the_last_node(tmp_path: Path) -> None:
    with Job(tmp_path, 6).start(nodes=3) as job:
        for node in range(3):
            line = job.said("status --connect", node)
            assert "`elaswave run --join " in line and job.output(node).count(line) == 1
        assert run_command(["drain", "5", str(job.run_dir)]) == 0
        for slot in range(6):
            job.tell(slot, "step 1")
        job.all("commit", range(5), epoch=2)
        for slot in range(5):
            job.tell(slot, "release")
        job.kill(4)
        job.all("commit", range(4), epoch=3)
        for node in range(3):  # a worker commits before its node's agent has told of it
            job.said("worker 4 (node 2) exited", node)
        job.kill_node(1)
        last = job.one("commit", 0)
        while {2, 3} & {*last["ranks"]}:
            last = job.one("commit", 0)
        assert job.finish([0, 1], launcher=0) == 0
    # The leader's node, another one, and the one whose workers went.
    for node in range(3):
        output = job.output(node)
        assert output.count("worker 5 (node 2) left: drained by the user; the job goes on") == 1
        lost = "worker 4 (node 2) exited: killed by SIGKILL; the job goes on with 4 workers"
        assert output.count(lost) == 1, output
    assert "with 2 workers, all on node 0, from which no other node can take over" in job.output()


def view(epoch: int, nodes: tuple[int, ...]) -> MembershipView:
    ranks = tuple(range(len(nodes)))
    return MembershipView(
        epoch=epoch, ranks=ranks, incarnations=(0,) * len(ranks), nodes=nodes, reason="why"
    )


def test_a_job_that_has_shrunk_to_one_node_says_that_no_other_can_take_over() -> None:
    before = [view(0, (0, 0, 1, 1)), view(1, (0, 0, 1, 1))]
    said = "why; the job goes on with 2 workers, all on node 0, from which no other node can take"
    assert words_of_view(view(2, (0, 0)), before) == f"{said} over (view 2)"
    # One that began there has been told at its start.
    detached = [view(0, (0, 0, 0)), view(1, (0, 0, 0))]
    assert (
        words_of_view(view(2, (0, 0)), detached) == "why; the job goes on with 2 workers (view 2)"
    )
    assert words_of_view(view(1, (0, 1)), [view(0, (0, 1))]) is None
