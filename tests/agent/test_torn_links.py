"""A network that tears the connections between the agents of a real job costs nobody."""

import ctypes
import itertools
import os
import socket
import time
from pathlib import Path

import psutil

from tests.agent.jobs import WAIT_S, Job
from tests.proofs import Kind, Promise, proves

_PIDFD_GETFD = 438
# Of a connection: the process of one end, and both addresses.
End = tuple[int, object, object]
# By two nodes, with the descriptor at the first of the two.
Ends = dict[tuple[int, int], dict[End, int]]


@proves(Kind.LINK, Promise.NOBODY_LOST)
def test_connections_that_are_torn_are_there_again(tmp_path: Path) -> None:
    """All of them, twice, and while all agents live: none of them is given up for it."""
    with Job(tmp_path, 6).start(nodes=3) as job:
        pids = [job.agents[2 * node] for node in range(3)]
        for _ in range(2):
            torn = links(pids)
            assert all(torn.values()), torn
            tear(torn)
            await_new(torn, pids)
        for slot in range(6):
            job.tell(slot, "seal 1")
        job.all("copied", range(6), step=1)
        assert [event["epoch"] for event in job.events("view_committed")] == [1]
        # What is said on the new ones is heard.
        job.kill(5)
        assert {tuple(one["ranks"]) for one in job.all("commit", range(5), epoch=2)} == {
            (0, 1, 2, 3, 4)
        }
        assert job.finish(range(5)) == 0
        assert [job.code(node) for node in (1, 2)] == [0, 0]
        assert job.left(WAIT_S) == []


def links(pids: list[int]) -> Ends:
    """The connections between every two agents: process and address of one end, by the pair."""
    of = [psutil.Process(pid).net_connections("tcp") for pid in pids]
    found: Ends = {}
    for one, other in itertools.combinations(range(len(pids)), 2):
        far = {link.laddr for link in of[other] if link.raddr and link.status == "ESTABLISHED"}
        found[one, other] = {
            (pids[one], link.laddr, link.raddr): link.fd for link in of[one] if link.raddr in far
        }
    return found


def await_new(old: Ends, pids: list[int]) -> None:
    """Wait until each pair has a connection, and none that it had before."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        now = links(pids)
        if all(now[pair] and not now[pair].keys() & old[pair].keys() for pair in old):
            return
        assert time.monotonic() < deadline_s, (old, now)
        time.sleep(0.02)  # the kernel's tables are all that shows it


def tear(torn: Ends) -> None:
    """Break connections, one right after the other."""
    socks = [copied(end[0], fd) for ends in torn.values() for end, fd in ends.items()]
    for sock in socks:
        sock.shutdown(socket.SHUT_RDWR)
    for sock in socks:
        sock.close()


def copied(pid: int, fd: int) -> socket.socket:
    """A socket that another process has open."""
    pidfd = os.pidfd_open(pid)
    own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert own >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(fileno=own)
