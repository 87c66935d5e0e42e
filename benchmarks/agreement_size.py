"""The cost of the agreement for its leader, at thousands of workers: bytes, processor time.

All agents of a job in one process, with the real state machines, codec and frames, and without
sockets: a message is encoded once, as it is to many, and read once. Trainers answer at once, with
facts and seals of the size that a job in a pipeline has.
"""

import gc
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.circumstances import circumstances
from benchmarks.command import JsonFile, run, tell, write
from elaswave_plugin.agent.peers.coordinator import Coordinator
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import Deliver, Ring, Send, Welcome, read_payload
from elaswave_plugin.core.agreement.quorum import Applicant
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.core.codec import from_json, to_json, to_wire
from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.ipc.frames import FromPeer
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import LENGTH, FrameBuffer, encode

STAGES = 8


class Job:
    """The agents of ``nodes`` nodes with ``width`` workers each, and what their leader spends."""

    def __init__(self, nodes: int, width: int) -> None:
        self.width = width
        self.of_slots = tuple(n for n in range(nodes) for _ in range(width))
        self.agents = {
            node: Agreement(node=node, nodes=self.of_slots, timeouts=Timeouts())
            for node in range(nodes)
        }
        for agent in self.agents.values():
            agent.addresses = {
                node: f"10.0.{node >> 8}.{node & 255}:29401" for node in range(nodes)
            }
        self.step = 0
        self.dice = random.Random(1)
        self.queue: deque[tuple[int, int, Any]] = deque()
        self.spent_s = 0.0
        self.sent: dict[str, int] = {}
        self.received = 0
        self.payload = ""
        self.settle([*self.agents])
        self.deliver()
        for slot, node in enumerate(self.of_slots):
            self.agents[node].first_seal(slot)
        self.settle([*self.agents])
        self.deliver()

    @property
    def leader(self) -> int:
        """The node that leads."""
        return min(self.agents)

    @contextmanager
    def of(self, node: int) -> Iterator[None]:
        """Count the processor time where it is the leader's."""
        began_s = time.process_time()
        yield
        spent_s = time.process_time() - began_s
        if node == self.leader:
            self.spent_s += spent_s

    def measured(self, what: Callable[[], None]) -> dict[str, Any]:
        """Let something happen, and return what the leader has spent on it."""
        self.spent_s, self.sent, self.received = 0.0, {}, 0
        # A leader has not the objects of all other agents in its process.
        gc.disable()
        try:
            what()
            self.deliver()
        finally:
            gc.enable()
        return {
            "leader_cpu_ms": round(1e3 * self.spent_s, 1),
            "longest_message_bytes": dict(sorted(self.sent.items())),
            "received_bytes": self.received,
        }

    def settle(self, nodes: list[int]) -> None:
        """Have agents act on what they know."""
        for node in nodes:
            with self.of(node):
                effects = self.agents[node].settle(0.0)
            for effect in effects:
                if isinstance(effect, Send):
                    self.queue.append((node, effect.to, effect.message))
                elif isinstance(effect, Ring):
                    self.answer(node, effect)
                elif isinstance(effect, Deliver):
                    self.payload = effect.committed.payload

    def deliver(self) -> None:
        """Until nothing is under way."""
        last: Any = None
        read: Any = None
        length = 0
        while self.queue:
            sender, to, message = self.queue.popleft()
            if message is not last:
                last = message
                with self.of(sender):
                    data = encode(message)
                length = len(data) - LENGTH.size
                kind = type(message).__name__
                if sender == self.leader:
                    self.sent[kind] = max(self.sent.get(kind, 0), length)
                with self.of(to):
                    (frame,) = FrameBuffer().feed(data)
                    read = from_json(FromPeer, frame)
            self.received += length if to == self.leader else 0
            if to not in self.agents:
                continue
            with self.of(to):
                self.agents[to].receive(sender, read, 0.0)
            self.settle([to])

    def answer(self, node: int, ring: Ring) -> None:
        """Have the trainers of a node stop, or say how far they are."""
        agent = self.agents[node]
        for slot in list(agent.seats):
            if ring.boundary and ring.before_step is None and slot in agent.committed.ranks:
                agent.begun(slot, ring.ballot, self.step)
            else:
                self.stop(node, slot, ring)
        self.settle([node])

    def stop(self, node: int, slot: int, ring: Ring) -> None:
        """Have a trainer stop, with its facts."""
        facts = json.loads(json.dumps(to_json(self.facts(slot)), default=to_json))
        self.agents[node].quiesced(slot, ring.ballot, facts, lambda: self.inventory(node))

    def facts(self, slot: int) -> WorkerFacts:
        """Facts as of a job in a pipeline that measures its links and layers."""
        times = {
            "link": [self.dice.uniform(1e-4, 1e-3), self.dice.uniform(1e-5, 1e-4)],
            "byte": [self.dice.uniform(1e-9, 1e-8)],
            "held": [4640.0, 99584.0, 0.0],
        }
        return WorkerFacts(
            address=f"10.0.{slot >> 11}.{(slot >> 3) & 255}:{self.dice.randrange(32768, 61000)}",
            step=self.step,
            live=(self.step, 1),
            placed_epoch=1,
            placement={"cuts": list(range(0, 4 * STAGES + 1, 4))},
            times={name: [float(f"{one:.5g}") for one in some] for name, some in times.items()},
        )

    def inventory(self, node: int) -> list[dict[str, Any]]:
        """Both buffers of each slot, and the copies that the node holds for the node before."""
        living = sorted(self.agents)
        before = living[living.index(node) - 1]
        found = []
        for holder, owner_node in ((node, node), (node, before)):
            for owner in (s for s in self.agents[owner_node].seats):
                group = tuple(range(owner % STAGES, len(self.of_slots), STAGES))
                for buffer in (0, 1):
                    digest = random.Random(owner * 2 + buffer).getrandbits(64)
                    shard = SealedShard(
                        owner=owner,
                        buffer=buffer,
                        step=max(0, self.step - buffer),
                        epoch=1,
                        shard_group=(owner % STAGES, 0),
                        units=(1, 0, -1),
                        ranks=group,
                        shard=owner // STAGES,
                        length=238421,
                        payload_bytes=238080,
                        capsule_bytes=333,
                        table_digest=digest,
                        holder=holder,
                        holder_address=self.agents[node].addresses[node],
                        is_copy=owner_node != node,
                    )
                    found.append(to_wire(shard))
        return found

    # ---- what happens -------------------------------------------------------------------------

    def lose_worker(self) -> None:
        """A trainer dies, and its state is taken on by the others."""
        self.step = 7
        node = len(self.agents) // 2
        slot = self.agents[node].nodes.slots_of(node)[0]
        self.agents[node].trainer_failed(slot, "exited: killed by SIGKILL", None, 0.0)
        self.settle([node])

    def worker_returns(self) -> None:
        """The trainer that was lost comes back between two steps."""
        node = len(self.agents) // 2
        slot = self.agents[node].nodes.slots_of(node)[0]
        self.agents[node].trainer_starts(slot, 1)
        self.agents[node].trainer_ready(slot, 0.0)
        self.settle([node])

    def lose_node(self) -> None:
        """The last node is gone."""
        gone = max(self.agents)
        del self.agents[gone]
        self.agents[self.leader].lost(gone, "its agent is gone")
        self.settle([self.leader])

    def node_joins(self) -> None:
        """A node is given the slots of the lost one, and its trainers enter."""
        leader = self.agents[self.leader]
        free = tuple(leader.nodes.without_agent)
        node = leader.nodes.unused_node
        with self.of(self.leader):
            leader.admit(Applicant(node=node, slots=free, address="10.1.0.0:29401"))
        self.welcome(node)
        for slot in free:
            self.agents[node].trainer_ready(slot, 0.0)
        self.settle([node])

    def welcome(self, node: int) -> None:
        """Deliver up to the welcome of a newcomer, with which it begins."""
        self.settle([self.leader])
        for sender, to, message in [*self.queue]:
            if to == node and isinstance(message, Welcome):
                self.queue.remove((sender, to, message))
                with self.of(sender):
                    data = encode(message)
                self.sent["Welcome"] = len(data)
                (frame,) = FrameBuffer().feed(data)
                told = from_json(FromPeer, frame)
                self.agents[node] = Agreement.of_newcomer(told, node, timeouts=Timeouts(), life=0)
        self.deliver()

    def elect(self) -> None:
        """The leader's node is gone: the next one leads, with the promises of all."""
        gone = self.leader
        del self.agents[gone]
        for agent in self.agents.values():
            agent.lost(gone, "its agent is gone")
        self.settle([*self.agents])


def beat_of(job: Job) -> dict[str, Any]:
    """Measure a beat of the leader, with real coordinator and frames."""
    sent: list[int] = []
    channel = mock.Mock(closed=False)
    channel.send = lambda beat: sent.append(len(encode(beat)))
    channel.answers = mock.Mock(silent_s=0.0, sent_again=0)
    agent = job.agents[job.leader]
    coordinator = Coordinator(
        mock.Mock(),
        agent,
        Peer(node=agent.node, pid=1, life=0, data="10.0.0.0:29401"),
        secret=Secret(bytes(32)),
        heartbeat=Heartbeat(),
        trainer_side=mock.Mock(progress=lambda awake_s: []),
        store=lambda record: None,
        events=mock.Mock(),
    )
    others = [node for node in job.agents if node != agent.node]
    coordinator._links.channels.update(dict.fromkeys(others, channel))
    coordinator._beat()  # the first one learns which ones to watch
    sent.clear()
    began_s, times = time.process_time(), 5
    for _ in range(times):
        coordinator._beat()
    spent_s = (time.process_time() - began_s) / times
    return {
        "leader_cpu_ms": round(1e3 * spent_s, 2),
        "sent_bytes": sum(sent) // times,
        "longest_message_bytes": {"Beat": max(sent)},
    }


def measure(nodes: int, width: int) -> dict[str, Any]:
    """One size: a beat, the commits after losses and returns, a join, an election."""
    job = Job(nodes, width)
    row: dict[str, Any] = {"nodes": nodes, "workers": nodes * width, "beat": beat_of(job)}
    for name, what in (
        ("commit", job.lose_worker),
        ("return", job.worker_returns),
        ("node_lost", job.lose_node),
        ("join", job.node_joins),
        ("election", job.elect),
    ):
        began = job.agents[job.leader].committed.epoch
        row[name] = job.measured(what)
        view = job.agents[job.leader].committed
        if view.epoch == began:
            raise AssertionError(f"{name}: no view was committed")
        row[name]["view_width"] = len(view.ranks)
        tell(f"{nodes} nodes, {name}: {row[name]}")
    began_s = time.process_time()
    told = read_payload(job.payload)
    row["payload"] = {
        "facts": len(told.facts),
        "shards": len(told.inventory),
        "read_cpu_ms": round(1e3 * (time.process_time() - began_s), 1),
    }
    return row


def main(nodes: str = "312,625,1250", per_node: int = 8, json_file: JsonFile = None) -> int:
    """Measure jobs of these numbers of nodes, in turn."""
    result = {
        **circumstances("benchmarks.agreement_size"),
        "simulated": "all agents in one process, without sockets, in no time, without garbage"
        " collection; facts and seals are made up",
        "rows": [measure(int(one), per_node) for one in nodes.split(",")],
    }
    write(result, json_file)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, "agreement_size", sys.argv[1:]))
