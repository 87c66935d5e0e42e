"""The least time of an agreed change: bare messages between processes, as an agreement has them.

python -m benchmarks.message_waves WORLD PER_NODE ROUNDS prints the median in ms.

A process for each agent and each worker, connected as those of a job are; the first agent leads.
One worker says something by way of its agent. Two waves follow, from the leader to all agents and
on to all workers, who answer the first one. Nothing is computed, stored or encoded.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

ANSWER = bytes(512)
"""As long as the facts of a worker with what is sealed of it."""
TIMES = struct.Struct("dd")
"""When a worker has said something (0: it has not), and when it had the commit."""


class Tree:
    """The processes of one job; sizes in bytes of what goes to each worker."""

    def __init__(self, world: int, per_node: int) -> None:
        self.proposal, self.commit = bytes(200 + 4 * world), bytes(400 + 40 * world)
        self.pids: list[int] = []
        nodes = max(1, world // per_node)
        of_nodes = [self._workers(world // nodes, node == nodes - 1) for node in range(nodes)]
        # The workers of the leader's own node, and the agents of the others.
        self.below = of_nodes[0] + [self._agent(workers) for workers in of_nodes[1:]]
        self.widths = [1] * len(of_nodes[0]) + [len(workers) for workers in of_nodes[1:]]

    def change(self) -> float:
        """One change; returns the seconds from what was said until the last one has the commit."""
        self.below[-1].sendall(b"g")
        receive(self.below[-1], 1)
        for sock in self.below:
            sock.sendall(self.proposal)
        for sock, width in zip(self.below, self.widths, strict=True):
            receive(sock, width * len(ANSWER))
        for sock in self.below:
            sock.sendall(self.commit)
        times: list[tuple[float, float]] = [
            (one[0], one[1])
            for sock, width in zip(self.below, self.widths, strict=True)
            for one in TIMES.iter_unpack(receive(sock, width * TIMES.size))
        ]
        return max(had_s for _, had_s in times) - max(said_s for said_s, _ in times)

    def close(self) -> None:
        """End all."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for sock in self.below:
            sock.close()

    # ---- the processes ------------------------------------------------------------------------

    def _workers(self, count: int, is_last: bool) -> list[socket.socket]:
        last = count - 1 if is_last else None
        return [self._forked(partial(self._work, one == last)) for one in range(count)]

    def _agent(self, workers: list[socket.socket]) -> socket.socket:
        sock = self._forked(lambda leader: self._serve(leader, workers))
        for one in workers:
            one.close()
        return sock

    def _forked(self, role: Callable[[socket.socket], None]) -> socket.socket:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                while True:
                    role(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self.pids.append(pid)
        return ours

    def _work(self, says: bool, agent: socket.socket) -> None:
        said_s = 0.0
        if says:
            receive(agent, 1)
            said_s = time.monotonic()
            agent.sendall(b"v")
        receive(agent, len(self.proposal))
        agent.sendall(ANSWER)
        receive(agent, len(self.commit))
        agent.sendall(TIMES.pack(said_s, time.monotonic()))

    def _serve(self, leader: socket.socket, workers: list[socket.socket]) -> None:
        first = leader.recv(1)
        if first == b"g":
            workers[-1].sendall(first)
            leader.sendall(receive(workers[-1], 1))
            first = b""
        receive(leader, len(self.proposal) - len(first))
        for message, answer in ((self.proposal, len(ANSWER)), (self.commit, TIMES.size)):
            for sock in workers:
                sock.sendall(message)
            leader.sendall(b"".join(receive(sock, answer) for sock in workers))
            if message is self.proposal:
                receive(leader, len(self.commit))


def receive(sock: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes; raises ConnectionError where the other end is gone."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("a process of the waves has ended")
        data += more
    return data


def floor_ms(world: int, per_node: int, rounds: int) -> float:
    """The median of some rounds."""
    tree = Tree(world, per_node)
    try:
        return 1e3 * median(tree.change() for _ in range(rounds))
    finally:
        tree.close()


if __name__ == "__main__":
    print(floor_ms(*map(int, sys.argv[1:])))
