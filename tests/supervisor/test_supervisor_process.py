"""A supervisor is a fork of the launcher, and has nothing of it."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.supervisor.jobs import WAIT_S, Job


def channels(pid: int) -> set[str]:
    """Sockets and pipes of a process beyond the standard ones, by what the kernel calls them."""
    names = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if int(fd.name) > 2:
                names.add(os.readlink(fd))
    return {name for name in names if name.startswith(("socket:", "pipe:"))}


def test_a_supervisor_keeps_nothing_of_its_launcher(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--standby=1") as job:
        launcher = channels(job.launchers[0].pid)
        assert launcher
        for slot, pid in job.supervisors.items():
            assert os.getpgid(pid) == pid
            own = channels(pid)
            # Where it tells its trainers' process ids.
            assert len(own & launcher) == 1 and "pipe" in min(own & launcher)
            assert not own & channels(job.supervisors[1 - slot])
        assert job.finish([0, 1]) == 0


@pytest.mark.parametrize("option", ["--standalone", "--preload=json"], ids=["exec", "zygote"])
def test_what_a_trainer_has_started_ends_with_its_supervisor(tmp_path: Path, option: str) -> None:
    with Job(tmp_path, 3, option).start() as job:
        job.tell(1, "start")
        pid = job.one("start", 1)["pid"]
        job.watch(pid)
        job.kill_supervisor(1)
        assert job.ended(pid)
        job.all("commit", [0, 2], epoch=2)
        assert job.finish([0, 2]) == 0
        assert job.left(WAIT_S) == []


def test_what_a_trainer_has_started_ends_with_one_that_has_joined(tmp_path: Path) -> None:
    # Its trainer does not ask to be let in: then it would wait for the others' next boundary.
    with Job(tmp_path, 2, TINY_READY="told").start("--standby=1") as job:
        job.kill_supervisor(1)
        job.all("commit", [0], epoch=2)
        job.one("detached", 1)
        job.tell(1, "start")
        pid = job.one("start", 1)["pid"]
        job.watch(pid)
        os.kill(job.events("worker_started")[-1]["supervisor_pid"], signal.SIGKILL)
        assert job.ended(pid)
        assert job.finish([0]) == 0
