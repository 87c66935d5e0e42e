"""Split backwards: weight gradients go where a worker would wait (pure, simulated greedily).

Forwards and input gradients keep the order of the lists, and no other worker waits for weight
gradients, so the new lists cannot block where the old ones do not.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from elaswave_plugin.core.step.schedule import FORWARD, WEIGHTS, Op, OpLists
from elaswave_plugin.core.step.simulate import LinkTime, OpGraph, StageTime, op_graph, retimed


def with_weights_in_bubbles(
    lists: OpLists,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    limits: Sequence[float] | None = None,
) -> OpLists:
    """Split every backward of ``lists`` and fill the waiting times with weight gradients.

    Where a forward would make a worker of stage s hold more than ``limits[s]`` samples (counted
    once a chunk, until their weight gradients are done), weight gradients go first.
    Raises ValueError for lists that deadlock.
    """
    return split_step(lists, op_graph(lists, times, link), times, limits=limits)[0]


def split_step(
    lists: OpLists,
    graph: OpGraph,
    times: Sequence[StageTime],
    *,
    limits: Sequence[float] | None = None,
) -> tuple[OpLists, float]:
    """The split lists and the seconds of the step that they take, as `simulate` would find.

    ``graph`` has the operations of ``lists``, in any order and made with any times.
    """
    filling = _Filling(lists, graph, times, limits or [float("inf")] * len(lists))
    filling.run()
    return filling.lists(), filling.seconds()


class _Filling:
    """The state of the simulation: where each worker is, and what it has yet to catch up."""

    def __init__(
        self,
        lists: OpLists,
        graph: OpGraph,
        times: Sequence[StageTime],
        limits: Sequence[float],
    ) -> None:
        self.graph = retimed(graph, times, is_split=True)
        self.times = times
        self.limits = limits
        self.num_stages = len(lists)
        count = len(self.graph.place)
        numbers = [
            {self.graph.ops[number]: number for number in range(*span)}
            for span in pairwise(self.graph.first)
        ]
        every = (ops for stage in lists for ops in stage)
        # What each worker has yet to run, the next one last.
        self.todo = [
            [known[op] for op in reversed(ops)] for known, ops in zip(numbers, every, strict=True)
        ]
        self.missing = list(self.graph.missing)
        self.ready = [0.0] * len(self.graph.ops)
        self.free = [0.0] * count
        self.held = [0] * count
        self.asleep = [False] * count
        self.pending: list[deque[Op]] = [deque() for _ in range(count)]
        self.filled: list[list[Op]] = [[] for _ in range(count)]
        self.events = [(0.0, worker) for worker in range(count)]

    def run(self) -> None:
        """Work off the events in the order of time."""
        while self.events:
            now, worker = heappop(self.events)
            if now < self.free[worker]:
                continue  # it was woken while it worked; the end of that work comes later
            self.asleep[worker] = False
            op = self.todo[worker][-1] if self.todo[worker] else None
            if self.pending[worker] and (op is None or self._weights_first(worker, op, now)):
                self._run_weights(worker, now)
            elif op is None:
                continue
            elif self.missing[op]:
                self.asleep[worker] = True
            elif self.ready[op] > now:
                heappush(self.events, (self.ready[op], worker))
            else:
                self._run_listed(worker, op, now)
        if any(self.todo):
            raise ValueError("the lists deadlock")

    def lists(self) -> OpLists:
        """List the operations that every worker ran, in order."""
        result: list[list[tuple[Op, ...]]] = [[] for _ in range(self.num_stages)]
        for (stage, _), ops in zip(self.graph.place, self.filled, strict=True):
            result[stage].append(tuple(ops))
        return tuple(map(tuple, result))

    def seconds(self) -> float:
        """Return when the last of the stages has reduced its gradients, those of all its chunks."""
        return max(
            free + sum(time.reduce_s for time in self.times[stage :: self.num_stages])
            for free, (stage, _) in zip(self.free, self.graph.place, strict=True)
        )

    def _weights_first(self, worker: int, op: int, now: float) -> bool:
        if self.missing[op] or self.ready[op] > now:
            return True
        task = self.graph.ops[op]
        size = task.stop - task.start
        limit = self.limits[self.graph.place[worker][0]]
        return task.kind == FORWARD and self.held[worker] + size > limit

    def _run_weights(self, worker: int, now: float) -> None:
        task = self.pending[worker].popleft()
        self.held[worker] -= task.stop - task.start
        self.filled[worker].append(task)
        virtual = task.chunk * self.num_stages + self.graph.place[worker][0]
        self.free[worker] = now + self.times[virtual].seconds(task, is_split=True)
        heappush(self.events, (self.free[worker], worker))

    def _run_listed(self, worker: int, op: int, now: float) -> None:
        task = self.graph.ops[op]
        self.todo[worker].pop()
        self.filled[worker].append(task)
        self.free[worker] = now + self.graph.seconds[op]
        heappush(self.events, (self.free[worker], worker))
        if task.kind == FORWARD:
            self.held[worker] += task.stop - task.start
        else:
            self.pending[worker].append(task._replace(kind=WEIGHTS))
        for target, delay_s in self.graph.targets[op]:
            self.missing[target] -= 1
            self.ready[target] = max(self.ready[target], self.free[worker] + delay_s)
            other = self.graph.worker[target]
            if not self.missing[target] and self.asleep[other] and self.todo[other][-1] == target:
                heappush(self.events, (self.ready[target], other))
