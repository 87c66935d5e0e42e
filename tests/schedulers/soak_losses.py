"""Losses of a long job, drawn from a seed: a worker, an agent, or a node of Slurm as a whole."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, Tail
from tests.idle import Deadline
from tests.schedulers.slurm import Slurm
from tests.schedulers.soak_watch import Watch

# Half of them whole nodes, which take longest to come back.
KINDS = ("node", "node", "node", "worker", "worker", "agent")
# Until then copies of a new view's state are where they have to be, and who has come votes.
SETTLED_STEPS = 3
START_S, SURVIVE_S, RETURN_S = 120.0, 60.0, 180.0
# So long a lost node is away; Slurm takes about 15 s to see the loss.
BOOT_S = 20.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss, and how many workers were away before it."""

    number: int
    kind: str
    slot: int
    node: int
    worker_pid: int
    is_leader: bool
    away: int
    at_s: float


class SoakedJob:
    """A running job, by the lines that it has written so far."""

    def __init__(self, directory: Path) -> None:
        self._events = Tail(directory / EVENTS_FILE)
        self._steps = Tail(directory / STEPS_FILE)
        self.ranks: list[int] = []
        self.workers: dict[int, dict[str, Any]] = {}
        self.agents: dict[int, dict[str, Any]] = {}
        self.is_over = False
        self.epoch = self.leader = -1
        self.done = -1
        # Steps that each slot has completed in the newest view.
        self._in_view: dict[int, int] = {}

    def look(self) -> None:
        """Read what is new."""
        for event in self._events.new():
            match event["kind"]:
                case "view_committed" if event["epoch"] > self.epoch:
                    self.epoch, self.ranks, self._in_view = event["epoch"], event["ranks"], {}
                    self.leader = event["by"]
                case "worker_started":
                    self.workers[event["slot"]] = event
                case "agent_started":
                    self.agents[event["node"]] = event
                case "job_over":
                    self.is_over = True
        for line in self._steps.new():
            self.done = max(self.done, line["step"])
            if line["epoch"] == self.epoch:
                self._in_view[line["slot"]] = self._in_view.get(line["slot"], 0) + 1

    def has_settled(self) -> bool:
        """Return whether all workers of the newest view have trained in it."""
        return bool(self.ranks) and all(
            self._in_view.get(slot, 0) >= SETTLED_STEPS for slot in self.ranks
        )

    def node_of(self, slot: int) -> int:
        """The node that has a slot."""
        return int(self.workers[slot]["node"])

    def processes(self) -> dict[int, str]:
        """The newest processes of each place, with what they are."""
        return {
            **{int(one["pid"]): "trainer" for one in self.workers.values()},
            **{int(one["pid"]): "agent" for one in self.agents.values()},
            **{int(one["guardian_pid"]): "guardian" for one in self.agents.values()},
        }

    def survives(self, kind: str, slot: int) -> bool:
        """Return whether the agreement has a majority without it, and a worker is left."""
        voters = {self.node_of(one) for one in self.ranks}
        heard = voters - {self.node_of(slot)} if kind == "node" else voters
        majority = 2 * len(heard) + (min(voters) in heard) > len(voters)
        return majority and (kind == "agent" or len(self.ranks) > 1)


class Losses:
    """Draws losses one after the other, and waits for what has to follow on each."""

    def __init__(
        self, seed: int, slurm: Slurm, job: SoakedJob, watch: Watch, *, width: int
    ) -> None:
        """``width``: workers of the whole job."""
        self._dice = random.Random(seed)
        self._slurm, self._job, self._watch, self._width = slurm, job, watch, width
        self._spared: int | None = None
        # Nodes of Slurm that are to come back, and when.
        self._down: dict[str, float] = {}
        self.losses: list[Loss] = []

    def draw_until(self, end_s: float, *, spare_after_s: float) -> None:
        """Lose until the time has come, and wait until all are back (times of time.time).

        One node is spared from some moment on: its processes live long and see many losses.
        """
        self.until(self._is_whole, START_S, "whole job")
        while time.time() < end_s:
            if self._spared is None and time.time() >= spare_after_s:
                self._spared = self._dice.choice(sorted(map(self._job.node_of, self._job.ranks)))
            self._draw()
        self.until(self._is_whole, RETURN_S, "whole job at the end")

    def await_end(self, limit_s: float) -> None:
        """Wait until the job is over."""
        self.until(lambda: self._job.is_over, limit_s, "end of the job")

    def _draw(self) -> None:
        job, dice = self._job, self._dice
        kind, pick = dice.choice(KINDS), dice.random()
        # Often the last one is still away.
        if dice.random() < 0.6:
            self.until(self._is_whole, RETURN_S, "return")
        step = job.done + dice.randint(1, 20)
        self.until(lambda: job.done >= step and job.has_settled(), SURVIVE_S, f"step {step}")
        time.sleep(dice.random() / 4)  # anywhere in a step
        job.look()
        may_be_lost = [
            slot
            for slot in sorted(job.ranks)
            if job.survives(kind, slot) and job.node_of(slot) != self._spared
        ]
        if job.has_settled() and may_be_lost:
            self._lose(kind, may_be_lost[int(pick * len(may_be_lost))])

    def _lose(self, kind: str, slot: int) -> None:
        job = self._job
        node, worker, epoch = job.node_of(slot), job.workers[slot], job.epoch
        agent, leader = job.agents[node], job.leader
        away, at_s = self._width - len(job.ranks), time.time()
        match kind:
            case "node":
                name = psutil.Process(agent["guardian_pid"]).environ()["SLURMD_NODENAME"]
                at_s = self._slurm.lose_node(name)
                self._down[name] = time.monotonic() + BOOT_S
            case "agent":
                os.kill(agent["pid"], signal.SIGKILL)
            case "worker":
                os.kill(worker["pid"], signal.SIGKILL)
        loss = Loss(
            number=len(self.losses),
            kind=kind,
            slot=slot,
            node=node,
            worker_pid=worker["pid"],
            is_leader=node == leader,
            away=away,
            at_s=at_s,
        )
        self.losses.append(loss)
        print(f"step {job.done}: {loss}", flush=True)
        if kind == "agent":
            self.until(lambda: job.agents[node] != agent, RETURN_S, "next agent")
        else:
            self.until(
                lambda: job.epoch > epoch and job.has_settled(), SURVIVE_S, "view without it"
            )

    def _is_whole(self) -> bool:
        return len(self._job.ranks) == self._width and self._job.has_settled()

    def until(self, reached: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for what only files show, and look at the processes meanwhile."""
        deadline = Deadline(limit_s)
        while True:
            self._job.look()
            self._watch.look(self._job.processes())
            self._bring_back()
            if reached():
                return
            assert not self._job.is_over, f"the job is over before the {what}"
            assert deadline.left_s(), f"no {what} within {limit_s:g} s"
            time.sleep(POLL_S)

    def _bring_back(self) -> None:
        for name in [one for one, due_s in self._down.items() if time.monotonic() >= due_s]:
            del self._down[name]
            self._slurm.bring_back(name)
