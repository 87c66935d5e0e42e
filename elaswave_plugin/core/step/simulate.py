"""The time of a step from the lists of all workers: a simulation that also finds deadlocks.

Every worker runs its list in order. A forward waits for the forwards of the stage before it that
overlap its samples, a backward for its own forward and for the overlapping backwards of the stage
after it; messages take time and occupy no worker (asynchronous sends). At the end each stage
reduces its gradients. Any lists may be given: what cannot run is reported, with the worker that
holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elaswave_plugin.core.step.schedule import BACKWARD, FORWARD, WEIGHTS, Op, OpLists, show_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one (virtual) stage: per sample, and ``fixed_s`` for each operation.

    A backward that is not split takes ``backward_s + weights_s``. ``reduce_s``: the reduction of
    the stage's gradients after the last backward.
    """

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    fixed_s: float = 0.0
    reduce_s: float = 0.0

    def seconds(self, op: Op, *, is_split: bool) -> float:
        """Return the seconds that an operation takes."""
        samples = op.stop - op.start
        if op.kind == FORWARD:
            return self.fixed_s + samples * self.forward_s
        if op.kind == WEIGHTS:
            return self.fixed_s + samples * self.weights_s
        whole = self.backward_s if is_split else self.backward_s + self.weights_s
        return self.fixed_s + samples * whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """Seconds of a message between stages: ``latency_s`` and ``sample_s`` for each sample."""

    latency_s: float = 0.0
    sample_s: float = 0.0

    def seconds(self, samples: int) -> float:
        """Return the seconds that a message of activations (or their gradients) is under way."""
        return self.latency_s + samples * self.sample_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a simulated step; ``blocked`` is empty unless the lists deadlock."""

    seconds: float
    busy: tuple[tuple[float, ...], ...]
    blocked: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.blocked:
            return "deadlock: " + "; ".join(self.blocked)
        return f"{self.seconds:g} s"


@dataclass(slots=True, kw_only=True)
class OpGraph:
    """Operations numbered through, worker by worker, and what waits for what.

    ``first[w]`` is the number of worker w's first operation, and ``first[w + 1]`` ends its list.
    ``missing`` counts what an operation still waits for on other workers.
    """

    ops: list[Op] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    targets: list[list[tuple[int, float]]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    place: list[tuple[int, int]] = field(default_factory=list)


def simulate(
    lists: OpLists,
    times: Sequence[StageTime],
    link: LinkTime,
    *,
    slowness: Sequence[Sequence[float]] = (),
) -> StepTime:
    """The step time of ``lists``; ``times`` by virtual stage (chunk c of stage s is c P + s).

    ``slowness`` [stage][worker]: how many times as long it takes; empty: none is slow.
    """
    graph = op_graph(lists, times, link)
    for op, worker in enumerate(graph.worker if slowness else ()):
        stage, index = graph.place[worker]
        graph.seconds[op] *= slowness[stage][index]
    ready = [0.0] * len(graph.ops)
    missing = list(graph.missing)
    head = graph.first[:-1]
    free = [0.0] * len(head)
    awake = list(range(len(head)))
    while awake:
        worker = awake.pop()
        while head[worker] < graph.first[worker + 1] and not missing[head[worker]]:
            op = head[worker]
            end = max(free[worker], ready[op]) + graph.seconds[op]
            free[worker] = end
            head[worker] += 1
            for target, delay_s in graph.targets[op]:
                missing[target] -= 1
                ready[target] = max(ready[target], end + delay_s)
                other = graph.worker[target]
                if not missing[target] and other != worker and head[other] == target:
                    awake.append(other)
    return _step_time(graph, lists, times, free, head)


def op_graph(lists: OpLists, times: Sequence[StageTime], link: LinkTime) -> OpGraph:
    """Number the operations and link each to what waits for it.

    A backward leaves the weight gradients out where a list has weight gradients of its own.
    Raises ValueError where forwards or backwards miss samples.
    """
    num_stages = len(lists)
    graph = OpGraph()
    rows: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for stage, workers in enumerate(lists):
        for index, ops in enumerate(workers):
            split = any(op.kind == WEIGHTS for op in ops)
            graph.first.append(len(graph.ops))
            graph.place.append((stage, index))
            for op in ops:
                virtual = op.chunk * num_stages + stage
                rows.setdefault((op.kind, virtual), []).append((op.start, op.stop, len(graph.ops)))
                graph.ops.append(op)
                graph.worker.append(len(graph.place) - 1)
                graph.seconds.append(times[virtual].seconds(op, is_split=split))
    graph.first.append(len(graph.ops))
    graph.targets = [[] for _ in graph.ops]
    graph.missing = [0] * len(graph.ops)
    for row in rows.values():
        row.sort()
    for virtual in range(len(times)):
        forward, backward = rows.get((FORWARD, virtual), []), rows.get((BACKWARD, virtual), [])
        if virtual:
            _join(graph, rows.get((FORWARD, virtual - 1), []), forward, link)
        if virtual + 1 < len(times):
            _join(graph, rows.get((BACKWARD, virtual + 1), []), backward, link)
        if [row[:2] for row in forward] != [row[:2] for row in backward]:
            raise ValueError(f"virtual stage {virtual}: forwards and backwards differ")
        for kind_rows in (backward, rows.get((WEIGHTS, virtual), [])):
            before = forward if kind_rows is backward else backward
            for early, late in zip(before, kind_rows, strict=False):
                graph.targets[early[2]].append((late[2], 0.0))
                graph.missing[late[2]] += 1
    return graph


def retimed(graph: OpGraph, times: Sequence[StageTime], *, is_split: bool = False) -> OpGraph:
    """The same operations where stages take other ``times``; ``is_split``: without the
    weight gradients, which are no operations of the graph.
    """
    num_stages = 1 + graph.place[-1][0]
    seconds = [
        times[op.chunk * num_stages + graph.place[worker][0]].seconds(op, is_split=is_split)
        for op, worker in zip(graph.ops, graph.worker, strict=True)
    ]
    return replace(graph, seconds=seconds)


def _join(
    graph: OpGraph,
    early: Sequence[tuple[int, int, int]],
    late: Sequence[tuple[int, int, int]],
    link: LinkTime,
) -> None:
    """Let each of ``late`` wait for the ``early`` ones that overlap its samples; both ascend."""
    position = 0
    targets, missing = graph.targets, graph.missing
    for start, stop, target in late:
        reached = start
        while position < len(early) and early[position][1] <= start:
            position += 1
        scan = position
        while reached < stop and scan < len(early) and early[scan][0] <= reached:
            overlap = min(stop, early[scan][1]) - reached
            targets[early[scan][2]].append((target, link.seconds(overlap)))
            missing[target] += 1
            reached += overlap
            scan += 1
        if reached < stop:
            raise ValueError(f"no stage before computes samples [{reached}, {stop})")


def _step_time(
    graph: OpGraph,
    lists: OpLists,
    times: Sequence[StageTime],
    free: Sequence[float],
    head: Sequence[int],
) -> StepTime:
    num_stages = len(lists)
    blocked = tuple(
        f"worker {index} of stage {stage} waits at {show_ops(graph.ops[op : op + 1])}"
        for (stage, index), op, stop in zip(graph.place, head, graph.first[1:], strict=True)
        if op < stop
    )
    ends = [0.0] * num_stages
    busy: list[list[float]] = [[] for _ in lists]
    for number, (stage, _) in enumerate(graph.place):
        ends[stage] = max(ends[stage], free[number])
        busy[stage].append(sum(graph.seconds[graph.first[number] : graph.first[number + 1]]))
    seconds = max(
        end + sum(time.reduce_s for time in times[stage::num_stages])
        for stage, end in enumerate(ends)
    )
    return StepTime(
        seconds=float("inf") if blocked else seconds,
        busy=tuple(map(tuple, busy)),
        blocked=blocked,
    )
