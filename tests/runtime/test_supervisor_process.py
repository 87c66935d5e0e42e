"""A supervisor is a fork of the launcher, and has nothing of it."""

import os
from pathlib import Path

from tests.runtime.jobs import Job


def channels(pid: int) -> set[str]:
    """Sockets and pipes of a process beyond the standard ones, by what the kernel calls them."""
    fds = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]
    return {name for name in map(os.readlink, fds) if name.startswith(("socket:", "pipe:"))}


def test_a_supervisor_keeps_nothing_of_its_launcher(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--standby=1") as job:
        launcher = channels(job.launchers[0].pid)
        assert launcher
        for slot, pid in job.supervisors.items():
            assert os.getpgid(pid) == pid
            own = channels(pid)
            assert own and not own & launcher
            assert not own & channels(job.supervisors[1 - slot])
        assert job.finish([0, 1]) == 0
