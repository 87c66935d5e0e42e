"""`elaswave drain SLOT` reaches the agent of that slot, and its refusals are told."""

import json
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.core.layout.layout import launch_layout
from tests.agent.jobs import Job
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves


def drain(slot: int, where: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command complains about."""
    assert run_command(["drain", str(slot), str(where)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_worker_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Job(tmp_path, 3).start() as job:
        job.kill(1)
        job.all("commit", [0, 2], epoch=2)
        error = drain(1, job.run_dir, capsys)
        assert job.finish([0, 2]) == 0
    assert error == "elaswave: worker 1 is not in the job, wanted one of 0 2\n"


def test_the_last_worker_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Job(tmp_path, 2).start() as job:
        job.kill(0)
        job.one("commit", 1, epoch=2)
        error = drain(1, job.run_dir, capsys)
        assert job.finish([1]) == 0
    assert error == "elaswave: worker 1 stays: it is the last one; end the job instead\n"


def test_a_worker_without_whom_a_stage_is_empty_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = launch_layout(tp=1, pp=2, dp=1, num_layers=2).to_json()
    told = json.dumps({**layout, "why_workers_stay": None}, separators=(",", ":"))
    with Job(tmp_path, 2).start() as job:
        job.tell(1, f"layout {told}")
        job.all("layout", [1])
        error = drain(1, job.run_dir, capsys)
        assert job.finish([0, 1]) == 0
    assert error == (
        "elaswave: worker 1 stays: without it 1 worker would be left for 2 stages;"
        " end the job instead, or wait until others have joined\n"
    )


def test_all_workers_of_a_node_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Job(tmp_path, 4).start(nodes=2) as job:
        assert run_command(["drain", "--node", "9", str(job.run_dir)]) == 2
        wanted = "elaswave: node 9 has no worker in the job, wanted one of 0 1\n"
        assert capsys.readouterr().err == wanted
        assert run_command(["drain", "--node", "1", str(job.run_dir)]) == 0
        assert capsys.readouterr().out.startswith("workers 2, 3 of node 1 leave between two steps")
        for slot in range(4):
            job.tell(slot, "step 1")
        left = [2, 3]
        while job.one("commit", 0)["ranks"] != [0, 1]:
            pass
        job.all("stopped", left)
        for slot in (0, 1):
            job.tell(slot, "release")
        assert job.finish([0, 1]) == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--node", "1", "2", "DIR"], "--node 1 and SLOT 2 are given, wanted one"),
        (["DIR"], "wanted SLOT DIR, or --node N DIR, and DIR is given"),
        ([], "and nothing is given"),
        (["1", "DIR", "2"], "and 1 DIR 2 is given"),
    ],
)
def test_a_worker_or_a_node_is_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["drain", *words]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_without_a_job_it_costs_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no job is running in" in drain(1, tmp_path, capsys)


def test_of_all_that_are_drained_the_last_one_stays(tmp_path: Path) -> None:
    """Nobody has left yet when the last one is asked, and nothing would be saved at the end."""
    with Job(tmp_path, 3).start() as job:
        for slot in range(3):
            assert run_command(["drain", str(slot), str(job.run_dir)]) == 0
        for slot in range(3):
            job.tell(slot, "step 1")
        assert job.one("commit", 2, epoch=2)["ranks"] == [2]
        job.tell(2, "release")
        job.all("stopped", [0, 1])
        # It leads the job now, alone, and does not remember that it was to leave.
        assert all(job.ended(job.pids[slot]) for slot in (0, 1))
        assert job.finish([2]) == 0
        assert "worker 2 stays: all others leave; end the job instead" in job.output()
        assert [event["slot"] for event in job.events("notice_void")] == [2]


def train_until(job: Job, ranks: list[int]) -> None:
    """Have all of three workers begin steps until those of ``ranks`` know of their view."""
    step, deadline = 1, Deadline(job.wait_s)
    while len(ranks) > sum((r["what"], r.get("ranks")) == ("commit", ranks) for r in job.reports):
        assert deadline.left_s(), job.outputs()
        for slot in range(3):
            job.tell(slot, f"begin {step}")
        job.listen(for_s=0.05)
        step += 1


@proves(Kind.AGENT, Promise.GOES_ON)
@pytest.mark.parametrize("is_proposed", [True, False])
def test_the_next_agent_remembers_who_is_to_leave(tmp_path: Path, is_proposed: bool) -> None:
    with Job(tmp_path, 3).start() as job:
        assert run_command(["drain", "1", str(job.run_dir)]) == 0
        if is_proposed:
            while len(job.events("view_proposed")) < 2:
                job.listen(for_s=0.01)
        job.kill_agent(0)
        job.next_agent(0, 1)
        train_until(job, ranks=[0, 2])
        for slot in (0, 2):
            job.tell(slot, "release")
        job.one("stopped", 1)
        assert job.ended(job.pids[1])
        assert job.finish([0, 2]) == 0


def test_a_worker_that_dies_before_it_has_left_is_not_started_again(tmp_path: Path) -> None:
    """It was to leave, and its node is to be free."""
    with Job(tmp_path, 3, TINY_RESPAWN="5").start() as job:
        assert run_command(["drain", "2", str(job.run_dir)]) == 0
        job.kill(2)
        job.all("commit", [0, 1], epoch=2)
        job.listen(for_s=2.0)  # as long as the others take for the recovery
        for slot in (0, 1):
            job.tell(slot, "release")
        assert job.ended(job.pids[2])
        assert job.finish([0, 1]) == 0
        assert [one["incarnation"] for one in job.events("worker_started")] == [0, 0, 0]
