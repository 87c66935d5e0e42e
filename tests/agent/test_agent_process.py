"""An agent is a fork of its guardian, and has nothing of it; what trainers started ends."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.agent.jobs import WAIT_S, Job
from tests.ports import free_port


def channels(pid: int) -> set[str]:
    """Sockets and pipes of a process beyond the standard ones, by what the kernel calls them."""
    names = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if int(fd.name) > 2:
                names.add(os.readlink(fd))
    return {name for name in names if name.startswith(("socket:", "pipe:"))}


def test_an_agent_keeps_nothing_of_its_guardian(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--standby=1") as job:
        guardian = job.launchers[0].pid
        (first,) = {*job.agents.values()}

        def check(pid: int) -> None:
            assert os.getpgid(pid) == pid
            # Where the trainers call, which the guardian holds for the lives that follow.
            shared = channels(pid) & channels(guardian)
            assert len(shared) == 2 and all(one.startswith("socket:") for one in shared)
            for trainer in job.pids.values():
                assert not channels(pid) & channels(trainer)

        check(first)
        job.kill_agent(0)
        check(job.next_agent(0, 1))  # it is forked while trainers run
        assert job.finish([0, 1]) == 0


@pytest.mark.parametrize("option", ["--standalone", "--preload=json"], ids=["exec", "zygote"])
def test_what_a_trainer_has_started_outlives_an_agent_and_ends_with_the_node(
    tmp_path: Path, option: str
) -> None:
    options = () if option == "--standalone" else (option,)
    with Job(tmp_path, 4, *options).start(nodes=2) as job:
        job.tell(2, "start")
        pid = job.one("start", 2)["pid"]
        job.watch(pid)
        job.kill_agent(2)
        job.next_agent(1, 1)
        job.kill(3)  # and what another one has started stays
        job.all("commit", [0, 1, 2], epoch=2)
        assert pid in job.left(0)
        job.kill(2)
        job.all("commit", [0, 1], epoch=3)
        assert job.ended(pid)
        assert job.finish([0, 1]) == 0
        assert job.code(1) in (0, 1)
        assert job.left(WAIT_S) == []


def test_what_a_trainer_has_started_ends_with_one_that_has_joined(tmp_path: Path) -> None:
    # Its trainer does not ask to be let in: then it would wait for the others' next boundary.
    with Job(tmp_path, 2, TINY_READY="told") as job:
        port = free_port()
        nodes = ("--nnodes=2", f"--master-port={port}")
        job.launch(*nodes, "--node-rank=0", "--standby=1")
        job.launch(*nodes, "--node-rank=1")
        job.joined()
        job.kill_node(1)
        job.all("commit", [0], epoch=2)
        joined = job.one("started", 1)
        job.watch(joined["pid"])
        job.one("detached", 1)
        job.tell(1, "start")
        pid = job.one("start", 1)["pid"]
        job.watch(pid)
        os.kill(joined["pid"], signal.SIGKILL)
        assert job.ended(pid)
        assert job.finish([0]) == 0
        assert job.left(WAIT_S) == []
