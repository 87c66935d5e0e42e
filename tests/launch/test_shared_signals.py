"""Signals to all processes of a job, as from a scheduler or systemd, and the second of two."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.supervisor.jobs import WAIT_S, Job

SHARED = (signal.SIGTERM, signal.SIGUSR1)


def signal_all(job: Job, number: int) -> None:
    """Signal the launcher and everything below it, the trainers first."""
    launcher = psutil.Process(job.launchers[0].pid)
    for process in [*reversed(launcher.children(recursive=True)), launcher]:
        process.send_signal(number)


def await_notice(job: Job, slot: int) -> None:
    """Until the trainer knows that it is to leave."""
    deadline_s = time.monotonic() + WAIT_S
    job.tell(slot, "told")
    while not job.one("told", slot)["to_leave"]:
        assert time.monotonic() < deadline_s
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
        # A copy is acknowledged once the supervisor has read what its trainer said before.
        job.all("copied", range(2), step=1)
        signal_all(job, number)
        for slot in range(2):
            await_notice(job, slot)
        assert job.finish([0, 1]) == 128 + number
        assert job.left(WAIT_S) == []
    assert [event["status"] for event in job.events("worker_exited")] == ["exit code 0"] * 2


def test_a_second_signal_after_a_while_ends_it_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        os.kill(job.supervisors[2], signal.SIGTERM)
        await_notice(job, 2)
        time.sleep(2.1)  # nearer to the first one it is the same one
        os.kill(job.supervisors[2], signal.SIGTERM)
        assert job.ended(job.pids[2])
        assert [report["ranks"] for report in job.all("commit", [0, 1])] == [[0, 1]] * 2
        assert job.finish([0, 1]) == 128 + signal.SIGTERM
    (ended,) = [event for event in job.events("worker_exited") if event["slot"] == 2]
    assert ended["status"] == "killed by SIGTERM"


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


def test_what_a_trainer_forks_ends_by_sigterm(tmp_path: Path) -> None:
    with Job(tmp_path, 1).start() as job:
        job.tell(0, "children")
        assert set(job.one("children", 0)["codes"]) == {-signal.SIGTERM}
        assert job.finish([0]) == 0
