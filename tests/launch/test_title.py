"""A job seen from outside: titles in the process list, and the lines of its launcher."""

from pathlib import Path

import psutil

from tests.agent.jobs import Job

ALONE = "and no other worker can take over from it"


def title(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def test_the_process_list_says_which_worker_a_process_belongs_to(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--preload=json") as job:
        for slot in (0, 1):
            assert title(job.pids[slot]).startswith(f"elaswave worker {slot}: ")
            assert title(job.agents[slot]).startswith("elaswave agent of node 0: ")
        parent = psutil.Process(job.pids[0]).parent()
        assert parent is not None and parent.pid == job.launchers[0].pid
        others = {child.pid for child in parent.children()} - {*job.pids.values()}
        (zygote,) = others - {*job.agents.values()}
        assert title(zygote).startswith("elaswave zygote: ")
        # What stands behind the command line in memory is as it was.
        assert psutil.Process(job.pids[0]).environ()["TINY_FOLDER"] == str(tmp_path)
        assert job.finish([0, 1]) == 0


def test_a_new_interpreter_shows_its_script_too(tmp_path: Path) -> None:
    with Job(tmp_path, 1).start() as job:
        assert title(job.pids[0]).startswith("elaswave worker 0: ")
        assert "tiny_trainer.py" in title(job.pids[0])
        assert job.finish([0]) == 0


def test_one_worker_is_told_that_nobody_can_take_over(tmp_path: Path) -> None:
    with Job(tmp_path, 1).start() as job:
        assert job.finish([0]) == 0
    assert job.output().count(f"the job has 1 worker, {ALONE}; start two or more") == 1


def test_the_last_worker_of_several_is_told_so_too(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        assert ALONE not in job.output()
        job.kill(2)
        job.all("commit", [0, 1], epoch=2)
        job.said("killed by SIGKILL; the job goes on with 2 workers (view 2)\n")
        job.kill(1)
        job.one("commit", 0, epoch=3)
        job.said(f"; the job goes on with 1 worker, {ALONE} (view 3)\n")
        assert job.finish([0]) == 0
