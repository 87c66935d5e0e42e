"""A second order of operations: the window rule, but nobody waits for what is next in its list.

A free worker runs its next forward or its next backward, whichever is ready; where both are, the
one that the window rule has first. Each kind goes in slot order, so that gradients are added as by
the window rule. It beats that rule where the first stage is narrow: elsewhere no backward waits for
a forward that is late. The lists are the order in which a simulation starts the operations, so they
cannot block. The simulation ends for any limit that a worker's largest slot fits into: of the
lowest unfinished slot, a worker that has not run its forward holds nothing older (done) and nothing
newer (no skipping); and all of its forwards run before its backwards do, from the last stage up.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from elaswave_plugin.core.schedule import FORWARD, Assignment, Op, OpLists, window_ops
from elaswave_plugin.core.step_time import LinkTime, StageTime, op_graph

# What the greedy order may hold, against the window rule: where memory allows it, it is the better
# order because it may hold more.
GREEDY_ROOM = 2


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
    return greedy_step(assignment, times, link, limits=limits, windows=windows)[0]


def greedy_step(
    assignment: Assignment,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    limits: Sequence[float],
    windows: Sequence[int],
) -> tuple[OpLists, float]:
    """The lists and the seconds of the step that they take, as `simulate` would find."""
    for stage, (workers, limit) in enumerate(zip(assignment, limits, strict=True)):
        largest = max(map(_largest_slot, workers))
        if largest > limit:
            raise ValueError(f"stage {stage} holds {largest} samples a slot, limit {limit}")
    greedy = _Greedy(assignment, times, link, limits, windows)
    lists = greedy.run()
    seconds = max(
        free + times[stage].reduce_s
        for free, (stage, _) in zip(greedy.free, greedy.graph.place, strict=True)
    )
    return lists, seconds


def _samples(op: Op) -> int:
    return op.stop - op.start


def _largest_slot(pieces: Sequence[tuple[int, int, int]]) -> int:
    sizes: dict[int, int] = {}
    for slot, start, stop in pieces:
        sizes[slot] = sizes.get(slot, 0) + stop - start
    return max(sizes.values(), default=0)


class _Greedy:
    """The state of the simulation: what is ready where, and what was started in which order."""

    def __init__(
        self,
        assignment: Assignment,
        times: Sequence[StageTime],
        link: LinkTime,
        limits: Sequence[float],
        windows: Sequence[int],
    ) -> None:
        # The lists only carry the operations; forwards before backwards, each in slot order.
        everything = 2 + max(one.slot for stage in assignment for own in stage for one in own)
        lists = tuple(
            tuple(window_ops(pieces, window=everything) for pieces in stage) for stage in assignment
        )
        self.graph = op_graph(lists, times, link)
        self.num_stages = len(assignment)
        count = len(self.graph.place)
        self.limits = [limits[stage] for stage, _ in self.graph.place]
        self.windows = [windows[stage] for stage, _ in self.graph.place]
        self.missing = list(self.graph.missing)
        self.ready = [0.0] * len(self.graph.ops)
        # The next forward and the next backward of each worker.
        self.forward = self.graph.first[:-1]
        self.backward = [(a + b) // 2 for a, b in pairwise(self.graph.first)]
        self.forwards_end = tuple(self.backward)
        self.free = [0.0] * count
        self.held = [0] * count
        self.started: list[list[Op]] = [[] for _ in range(count)]
        self.events = [(0.0, worker) for worker in range(count)]

    def run(self) -> OpLists:
        """Work off the events in the order of time."""
        while self.events:
            now, worker = heappop(self.events)
            if now < self.free[worker]:
                continue
            op = self._choose(worker, now)
            if op is not None:
                self._start(worker, op, now)
        result: list[list[tuple[Op, ...]]] = [[] for _ in range(self.num_stages)]
        for (stage, _), ops in zip(self.graph.place, self.started, strict=True):
            result[stage].append(tuple(ops))
        return tuple(map(tuple, result))

    def _choose(self, worker: int, now: float) -> int | None:
        forward, backward = self.forward[worker], self.backward[worker]
        ops = self.graph.ops
        may_forward = (
            forward < self.forwards_end[worker]
            and self._is_ready(forward, now)
            and self.held[worker] + _samples(ops[forward]) <= self.limits[worker]
        )
        may_backward = backward < self.graph.first[worker + 1] and self._is_ready(backward, now)
        if may_forward and may_backward:
            may_forward = ops[forward].slot < ops[backward].slot + self.windows[worker]
            may_backward = not may_forward
        if may_forward:
            self.forward[worker] += 1
            return forward
        if may_backward:
            self.backward[worker] += 1
            return backward
        return None

    def _is_ready(self, op: int, now: float) -> bool:
        return not self.missing[op] and self.ready[op] <= now

    def _start(self, worker: int, op: int, now: float) -> None:
        task = self.graph.ops[op]
        self.held[worker] += _samples(task) if task.kind == FORWARD else -_samples(task)
        self.started[worker].append(task)
        self.free[worker] = end = now + self.graph.seconds[op]
        heappush(self.events, (end, worker))
        for target, delay_s in self.graph.targets[op]:
            self.missing[target] -= 1
            self.ready[target] = max(self.ready[target], end + delay_s)
            if not self.missing[target]:
                heappush(self.events, (self.ready[target], self.graph.worker[target]))
