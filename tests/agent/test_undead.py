"""A trainer that SIGKILL does not end, as one that is stuck in the kernel, stops nobody for ever.

What stands for it here is a process of which one thread is traced: it cannot be reaped, and is
not reported to its parent, before the tracer has taken note of the thread's end.
"""

import ctypes
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.jobs import WAIT_S, Job
from tests.proofs import Kind, Promise, proves

PTRACE_SEIZE = 0x4206
WAIT_FOR_THREADS = 0x40000000


@contextmanager
def undead(pid: int) -> Iterator[None]:
    """Hold back the report of a process's end until the block is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    thread = max(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    if libc.ptrace(PTRACE_SEIZE, thread, 0, 0) != 0:
        pytest.skip(f"tracing is not permitted here: {os.strerror(ctypes.get_errno())}")
    pidfd = os.pidfd_open(pid)
    try:
        yield
        assert not select.select([pidfd], [], [], 0)[0], "its end was reported"
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(thread, WAIT_FOR_THREADS)


@proves(Kind.UNDEAD, Promise.GOES_ON, victim="1")
def test_one_that_does_not_answer_and_does_not_die_counts_as_gone(tmp_path: Path) -> None:
    with Job(tmp_path, 3, "--quiesce-timeout-s=1").start() as job:
        with undead(job.pids[2]):
            job.tell(2, "deaf")
            job.one("deaf", 2)
            job.kill(1)
            report = job.one("commit", 0, epoch=3)
            # Nor does the job wait for it at its end.
            assert job.finish([0]) == 0
        assert job.left(WAIT_S) == []
    assert report["ranks"] == [0]
    assert report["reason"].endswith(
        "worker 2 (node 0) exited: did not answer the proposal of view 2 within 1 s; "
        "SIGKILL has not ended it within 5 s"
    )


@proves(Kind.SIGNAL, Promise.CLEAN)
@pytest.mark.parametrize("option", ["--standalone", "--preload=json"], ids=["exec", "zygote"])
def test_a_job_that_is_told_to_end_does_not_wait_for_it(tmp_path: Path, option: str) -> None:
    with Job(tmp_path, 2, option).start() as job:
        with undead(job.pids[1]):
            job.launchers[0].terminate()
            assert job.code() == 128 + signal.SIGTERM
        assert job.left(WAIT_S) == []
    assert "Traceback" not in job.output()


@proves(Kind.UNDEAD, Promise.GOES_ON)
def test_one_that_finishes_and_does_not_die_is_done(tmp_path: Path) -> None:
    with Job(tmp_path, 2, "--finish-grace-s=0.5").start() as job:
        with undead(job.pids[0]):
            job.tell(0, "hang")
            assert job.finish([1]) == 0
        assert job.left(WAIT_S) == []
    assert job.events("job_over")[0]["reason"] == "all workers have finished"


@proves(Kind.UNDEAD, Promise.GOES_ON)
def test_another_one_starts_once_it_has_ended_after_all(tmp_path: Path) -> None:
    with Job(tmp_path, 3, "--quiesce-timeout-s=1", TINY_RESPAWN="10").start() as job:
        with undead(job.pids[2]):
            job.tell(2, "deaf")
            job.one("deaf", 2)
            job.tell(1, "leave")
            assert job.one("commit", 0, epoch=3)["ranks"] == [0]
            assert job.nothing("started", 2, for_s=2.0)
        job.watch(job.one("started", 2)["pid"])
        job.one("detached", 2)
        assert job.finish([0]) == 0
        assert job.left(WAIT_S) == []
    (late,) = job.events("worker_exited_late")
    assert (late["slot"], late["incarnation"], late["status"]) == (2, 0, "killed by SIGKILL")
