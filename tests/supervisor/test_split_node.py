"""A network that loses single flows between the supervisors of a real job."""

import ctypes
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.supervisor.jobs import WAIT_S, Job

PARTS = ({0, 1, 4}, {2, 3, 5})
SILENCE_S = 2.0
_PIDFD_GETFD = 438


@pytest.mark.slow
def test_of_two_parts_that_each_hear_most_nodes_one_goes_on(tmp_path: Path) -> None:
    """Node 2 has two workers: one hears node 0 only, the other one hears node 1 only."""
    options = ("--quorum-wait-s=0.5", f"--heartbeat-timeout-s={SILENCE_S:g}")
    with Job(tmp_path, 6).start(*options, nodes=3) as job:
        sever(job, [(one, other) for one in PARTS[0] for other in PARTS[1] - {one ^ 1}])
        going = await_one_part(job)
        # Not for the moment only: it counts on node 2 for as long as it works.
        for slot in going:
            job.tell(slot, f"act {1.5 * SILENCE_S:g}")
        job.all("acts", going)
        for slot in going:
            job.tell(slot, "finish")
        codes = [job.code(node) for node in range(3)]
        assert job.left(WAIT_S) == []
    goes, ends = (0, 1) if 0 in going else (1, 0)
    # On node 2 one worker is stopped, and the other one has seen the end of the job.
    assert codes[goes] == codes[2] == 0
    assert codes[ends] == 1
    for node in (ends, 2):
        said = job.output(node)
        assert "no majority" in said or "declared lost" in said or "gone on without" in said
    epochs = [event["epoch"] for event in job.events("view_committed")]
    assert sorted(set(epochs)) == sorted(epochs)


def sever(job: Job, pairs: list[tuple[int, int]]) -> None:
    """Break all connections between these supervisors, one right after the other."""
    links = [psutil.Process(job.supervisors[slot]).net_connections("tcp") for slot in range(6)]
    torn = []
    for one, other in pairs:
        far = {link.laddr for link in links[other] if link.raddr}
        both = [link.fd for link in links[one] if link.raddr in far]
        assert both, f"supervisors {one} and {other} have no connection"
        torn += [copied(job.supervisors[one], fd) for fd in both]
    for sock in torn:
        sock.shutdown(socket.SHUT_RDWR)
    for sock in torn:
        sock.close()


def copied(pid: int, fd: int) -> socket.socket:
    """A socket that another process has open."""
    pidfd = os.pidfd_open(pid)
    own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert own >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(fileno=own)


def await_one_part(job: Job) -> list[int]:
    """The members of the last view, all of one part, once all others have ended."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        ranks = set(job.events("view_committed")[-1]["ranks"])
        lives = {slot for slot in range(6) if psutil.pid_exists(job.pids[slot])}
        if lives == ranks and any(ranks <= part for part in PARTS):
            return sorted(ranks)
        assert lives, f"neither goes on:\n{job.outputs()}"
        assert time.monotonic() < deadline_s, (ranks, lives, job.outputs())
        job.listen(0.05)  # the events are all that tells the views
