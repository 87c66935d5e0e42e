"""Signals to all processes of a job, as from a scheduler or systemd, and the second of two."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.agent.jobs import TRAINER, WAIT_S, Job
from tests.idle import Deadline
from tests.ports import free_port
from tests.trainer.test_zygote import start_zygote

SHARED = (signal.SIGTERM, signal.SIGUSR1)


def signal_all(job: Job, number: int) -> None:
    """Signal the launcher and everything below it, the trainers first."""
    launcher = psutil.Process(job.launchers[0].pid)
    for process in [*reversed(launcher.children(recursive=True)), launcher]:
        process.send_signal(number)


def await_notice(job: Job, slot: int) -> None:
    """Until the trainer knows that it is to leave."""
    deadline = Deadline(WAIT_S)
    job.tell(slot, "told")
    while not job.one("told", slot)["to_leave"]:
        assert deadline.left_s()
        job.tell(slot, "told")


@pytest.mark.parametrize("option", ["--standalone", "--preload=json"], ids=["exec", "zygote"])
@pytest.mark.parametrize("number", SHARED, ids=["term", "usr1"])
def test_trainers_end_their_work_though_all_are_signalled(
    tmp_path: Path, number: int, option: str
) -> None:
    """As with the launcher alone: all stop before one step, write what they write last, and end."""
    with Job(tmp_path, 2, option).start() as job:
        for slot in range(2):
            job.tell(slot, "saves_last")
            job.tell(slot, "seal 1")
        # A copy is acknowledged once the agent has read what its trainer said before.
        job.all("copied", range(2), step=1)
        signal_all(job, number)
        for slot in range(2):
            await_notice(job, slot)
        assert job.finish([0, 1]) == 128 + number
        assert job.left(WAIT_S) == []
    assert [event["status"] for event in job.events("worker_exited")] == ["exit code 0"] * 2


@pytest.mark.parametrize("victim", [0, 2], ids=["guardian", "task"])
def test_a_second_signal_after_a_while_ends_it_at_once(tmp_path: Path, victim: int) -> None:
    """As a launcher signals the task of one worker: the others go on, beside that task."""
    others = [slot for slot in range(3) if slot != victim]
    with Job(tmp_path, 3) as job:
        for command in tasks(job):
            job.launch(command=command)
        job.joined()
        job.launchers[victim].terminate()
        await_notice(job, victim)
        time.sleep(2.1)  # nearer to the first one it is the same one
        job.launchers[victim].terminate()
        assert job.ended(job.pids[victim])
        assert [report["ranks"] for report in job.all("commit", others)] == [others] * 2
        assert job.finish(others) == 0
        assert [job.code(number) for number in range(3)] == [0, 0, 0]
    (ended,) = [event for event in job.events("worker_exited") if event["slot"] == victim]
    assert ended["status"] == "killed by SIGTERM"


def test_tasks_that_are_all_signalled_have_time_to_end(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        for command in tasks(job):
            job.launch(command=command)
        job.joined()
        for slot in range(2):
            job.tell(slot, "saves_last")
        job.all("saves_last", range(2))
        for process in job.launchers:
            process.terminate()
        for slot in range(2):
            await_notice(job, slot)
        job.finish([0, 1])
        # They had the time to finish their work: it is done.
        assert [job.code(number) for number in range(2)] == [0, 0]
        assert job.left(WAIT_S) == []
    assert [event["status"] for event in job.events("worker_exited")] == ["exit code 0"] * 2


def test_a_task_whose_trainer_a_zygote_forks_hands_on_its_signals(tmp_path: Path) -> None:
    zygote = start_zygote(tmp_path)
    try:
        with Job(tmp_path / "job", 2, ELASWAVE_ZYGOTE=str(tmp_path / "z.sock")) as job:
            for command in tasks(job):
                job.launch(command=command)
            job.joined()
            assert [psutil.Process(job.pids[slot]).ppid() for slot in range(2)] == [zygote.pid] * 2
            job.launchers[1].terminate()
            await_notice(job, 1)
            job.tell(0, "told")
            assert not job.one("told", 0)["to_leave"]
            assert job.finish([0, 1]) == 0
            assert job.code(1) == 0
    finally:
        zygote.terminate()
        assert zygote.wait(WAIT_S) == 0


def tasks(job: Job) -> list[list[str]]:
    """The commands of the tasks of one node, one for each worker, as a launcher starts them."""
    port = free_port()
    found = []
    for rank in range(job.world):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        numbers |= {"WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
        env = [f"{name}={value}" for name, value in numbers.items()]
        env += ["MASTER_ADDR=127.0.0.1", f"ELASWAVE_DIR={job.run_dir}"]
        found.append(["env", *env, sys.executable, "-m", "elaswave_plugin.run", str(TRAINER)])
    return found


@pytest.mark.parametrize("later", [1, 2], ids=["second", "third"])
def test_later_signals_to_the_launcher_are_passed_on(tmp_path: Path, later: int) -> None:
    """By the second one, after a while, nothing is awaited any more; by a third one at any time."""
    with Job(tmp_path, 2, "--notice-timeout-s=300").start() as job:
        for slot in range(2):
            job.tell(slot, "saves_last")
        job.all("saves_last", range(2))
        job.launchers[0].terminate()
        for slot in range(2):
            await_notice(job, slot)
        time.sleep(2.1 if later == 1 else 0.0)  # nearer to the first one it is the same one
        for _ in range(later):
            job.launchers[0].terminate()
            time.sleep(0.1)  # two at once are one
        assert job.code() == 128 + signal.SIGTERM
        assert job.left(WAIT_S) == []


def test_one_that_joins_though_it_had_to_end_ends_no_agent(tmp_path: Path) -> None:
    """Its script handles the signal by which it was ended before the job began."""
    with Job(tmp_path, 2, TINY_OUTLIVES="1") as job:
        job.launch("--nproc-per-node=2", "--node-rank=0")
        for report in job.all("started", range(2)):
            job.watch(report["pid"])
        deadline = Deadline(WAIT_S)
        while len(job.events("worker_started")) < 2:
            assert deadline.left_s()
            time.sleep(0.005)  # the file is all that shows that there is a job
        job.launchers[0].terminate()
        assert job.code() == 128 + signal.SIGTERM
        assert job.left(WAIT_S) == []
        assert "Traceback" not in job.output() and "another one goes on" not in job.output()


def test_what_a_trainer_forks_ends_by_sigterm(tmp_path: Path) -> None:
    with Job(tmp_path, 1).start() as job:
        job.tell(0, "children")
        assert set(job.one("children", 0)["codes"]) == {-signal.SIGTERM}
        assert job.finish([0]) == 0
