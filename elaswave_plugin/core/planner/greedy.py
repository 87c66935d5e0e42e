"""A second order of operations: whatever is ready, backwards first, within in-flight limits.

A free worker takes a ready backward, else its next forward in slot order if that is ready and fits
its limit. It beats the window rule where the first stage is narrow and memory is free. The lists
are the order in which a simulation starts the operations, so they cannot block. The simulation ends
for any limit that a worker's largest slot fits into: of the lowest unfinished slot, a worker that
has not run its forward holds nothing older (done) and nothing newer (no skipping).
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from elaswave_plugin.core.schedule import FORWARD, Assignment, Op, OpLists, window_ops
from elaswave_plugin.core.step_time import LinkTime, StageTime, op_graph


def greedy_lists(
    assignment: Assignment,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    limits: Sequence[float],
) -> OpLists:
    """Lists for pipelines without interleaving; ``limits[s]``: samples in flight on a worker.

    Raises ValueError where a limit is below a worker's largest slot.
    """
    return greedy_step(assignment, times, link, limits=limits)[0]


def greedy_step(
    assignment: Assignment,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    limits: Sequence[float],
) -> tuple[OpLists, float]:
    """The lists and the seconds of the step that they take, as `simulate` would find."""
    for stage, (workers, limit) in enumerate(zip(assignment, limits, strict=True)):
        largest = max(map(_largest_slot, workers))
        if largest > limit:
            raise ValueError(f"stage {stage} holds {largest} samples a slot, limit {limit}")
    greedy = _Greedy(assignment, times, link, limits)
    lists = greedy.run()
    seconds = max(
        free + times[stage].reduce_s
        for free, (stage, _) in zip(greedy.free, greedy.graph.place, strict=True)
    )
    return lists, seconds


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
    ) -> None:
        # The lists only carry the operations; forwards before backwards, each in slot order.
        everything = max(len(pieces) for stage in assignment for pieces in stage)
        lists = tuple(
            tuple(window_ops(pieces, window=everything + 1) for pieces in stage)
            for stage in assignment
        )
        self.graph = op_graph(lists, times, link)
        self.num_stages = len(assignment)
        count = len(self.graph.place)
        self.limits = [limits[stage] for stage, _ in self.graph.place]
        self.missing = list(self.graph.missing)
        self.ready = [0.0] * len(self.graph.ops)
        self.forward = self.graph.first[:-1]
        self.backwards: list[list[tuple[int, float, int]]] = [[] for _ in range(count)]
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
        ready = [entry for entry in self.backwards[worker] if entry[1] <= now]
        if ready:
            best = min(ready)
            self.backwards[worker].remove(best)
            return best[2]
        op = self.forward[worker]
        if op >= self.graph.first[worker + 1] or self.graph.ops[op].kind != FORWARD:
            return None
        task = self.graph.ops[op]
        fits = self.held[worker] + task.stop - task.start <= self.limits[worker]
        if self.missing[op] or self.ready[op] > now or not fits:
            return None
        self.forward[worker] += 1
        return op

    def _start(self, worker: int, op: int, now: float) -> None:
        task = self.graph.ops[op]
        size = task.stop - task.start
        self.held[worker] += size if task.kind == FORWARD else -size
        self.started[worker].append(task)
        self.free[worker] = end = now + self.graph.seconds[op]
        heappush(self.events, (end, worker))
        for target, delay_s in self.graph.targets[op]:
            self.missing[target] -= 1
            self.ready[target] = max(self.ready[target], end + delay_s)
            if not self.missing[target]:
                other = self.graph.worker[target]
                if self.graph.ops[target].kind != FORWARD:
                    slot = self.graph.ops[target].slot
                    self.backwards[other].append((slot, self.ready[target], target))
                heappush(self.events, (self.ready[target], other))
