"""Orders of operations beside the window rule: greedy, and with backwards that are split.

The greedy one is that rule without waiting for what is next in a list.

A free worker runs its next forward or its next backward, whichever is ready; where both are, the
one that the window rule has first. Each kind goes in slot order, so that gradients are added as by
the window rule. It beats that rule where the first stage is narrow: elsewhere no backward waits for
a forward that is late. The lists are the order in which a simulation starts the operations, so they
cannot block. The simulation ends for any limit that a worker's largest slot fits into: of the
lowest unfinished slot, a worker that has not run its forward holds nothing older (done) and nothing
newer (no skipping); and all of its forwards run before its backwards do, from the last stage up.

Split backwards are simulated greedily as well: their weight gradients go where a worker would wait.
Forwards and input gradients keep the order of the lists, and no other worker waits for weight
gradients, so the new lists cannot block where the old ones do not.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from elaswave_plugin.core.step.schedule import BACKWARD, FORWARD, WEIGHTS, Assignment, Op, OpLists
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


# What the greedy order may hold, against the window rule: where memory allows it, it is the better
# order because it may hold more.
GREEDY_ROOM = 2
_KINDS = (FORWARD, BACKWARD)


def greedy_room(peaks: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Samples in flight on a worker by stage, within ``limits``; ``peaks``: by the window rule."""
    return [min(limit, GREEDY_ROOM * peak) for limit, peak in zip(limits, peaks, strict=True)]


def greedy_lists(
    assignment: Assignment,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    limits: Sequence[float],
    windows: Sequence[int],
) -> OpLists:
    """Lists for pipelines without interleaving; ``limits[s]``: samples in flight on a worker.

    ``windows``: of the window rule by which a worker chooses. Raises ValueError where a limit is
    below a worker's largest slot.
    """
    graph = greedy_graph(assignment, times, link)
    return greedy_step(graph, times, limits=limits, windows=windows)[0]


def greedy_graph(assignment: Assignment, times: Sequence[StageTime], link: LinkTime) -> OpGraph:
    """The operations of all workers, on each the forwards before the backwards, in slot order."""
    lists = tuple(
        tuple(tuple(Op(kind, 0, *piece) for kind in _KINDS for piece in sorted(own)) for own in one)
        for one in assignment
    )
    return op_graph(lists, times, link)


def greedy_step(
    graph: OpGraph,
    times: Sequence[StageTime],
    *,
    limits: Sequence[float],
    windows: Sequence[int],
) -> tuple[OpLists, float]:
    """The lists and the seconds of the step that they take, as `simulate` would find.

    ``graph``: by `greedy_graph`, whatever the times it was made with.
    """
    greedy = _Greedy(retimed(graph, times), limits, windows)
    lists = greedy.run()
    seconds = max(
        free + times[stage].reduce_s
        for free, (stage, _) in zip(greedy.free, greedy.graph.place, strict=True)
    )
    return lists, seconds


class _Greedy:
    """The state of the simulation: what is ready where, and what was started in which order."""

    def __init__(self, graph: OpGraph, limits: Sequence[float], windows: Sequence[int]) -> None:
        self.graph = graph
        count = len(graph.place)
        self.limits = [limits[stage] for stage, _ in graph.place]
        self.windows = [windows[stage] for stage, _ in graph.place]
        self.sizes = [op.stop - op.start for op in graph.ops]
        self._check_limits()
        self.missing = list(graph.missing)
        self.ready = [0.0] * len(graph.ops)
        # The next forward and the next backward of each worker.
        self.forward = graph.first[:-1]
        self.backward = [(a + b) // 2 for a, b in pairwise(graph.first)]
        self.forwards_end = tuple(self.backward)
        self.free = [0.0] * count
        self.held = [0] * count
        self.started: list[list[Op]] = [[] for _ in range(count)]
        self.events = [(0.0, worker) for worker in range(count)]

    def _check_limits(self) -> None:
        slots: dict[tuple[int, int], int] = {}
        for op, worker, size in zip(self.graph.ops, self.graph.worker, self.sizes, strict=True):
            if op.kind == FORWARD:
                slots[worker, op.slot] = slots.get((worker, op.slot), 0) + size
        for (worker, _), size in slots.items():
            if size > self.limits[worker]:
                stage, limit = self.graph.place[worker][0], self.limits[worker]
                raise ValueError(f"stage {stage} holds {size} samples a slot, limit {limit}")

    def run(self) -> OpLists:
        """Work off the events in the order of time."""
        while self.events:
            now, worker = heappop(self.events)
            if now < self.free[worker]:
                continue
            op = self._choose(worker, now)
            if op is not None:
                self._start(worker, op, now)
        result: list[list[tuple[Op, ...]]] = [[] for _ in range(1 + self.graph.place[-1][0])]
        for (stage, _), ops in zip(self.graph.place, self.started, strict=True):
            result[stage].append(tuple(ops))
        return tuple(map(tuple, result))

    def _choose(self, worker: int, now: float) -> int | None:
        """Choose the operation that the worker starts now, if any."""
        forward, backward = self.forward[worker], self.backward[worker]
        missing, ready, ops = self.missing, self.ready, self.graph.ops
        may_forward = (
            forward < self.forwards_end[worker]
            and not missing[forward]
            and ready[forward] <= now
            and self.held[worker] + self.sizes[forward] <= self.limits[worker]
        )
        may_backward = (
            backward < self.graph.first[worker + 1]
            and not missing[backward]
            and ready[backward] <= now
        )
        if may_forward and may_backward:
            may_forward = ops[forward].slot < ops[backward].slot + self.windows[worker]
        if may_forward:
            self.forward[worker] += 1
            self.held[worker] += self.sizes[forward]
            return forward
        if may_backward:
            self.backward[worker] += 1
            self.held[worker] -= self.sizes[backward]
            return backward
        return None

    def _start(self, worker: int, op: int, now: float) -> None:
        """Run it, and wake the workers that have waited for it alone."""
        self.started[worker].append(self.graph.ops[op])
        missing, ready = self.missing, self.ready
        self.free[worker] = end = now + self.graph.seconds[op]
        heappush(self.events, (end, worker))
        for target, delay_s in self.graph.targets[op]:
            arrived = end + delay_s
            if arrived > ready[target]:
                ready[target] = arrived
            missing[target] -= 1
            if not missing[target]:
                heappush(self.events, (ready[target], self.graph.worker[target]))
