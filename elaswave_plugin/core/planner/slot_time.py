"""The step time of window-rule lists, a whole slot of a stage at a time: what `simulate` gives.

For lists by the window rule every worker of a stage goes through the slots in one order, so the
dependencies between (stage, slot, kind) decide the order of computing, and all workers of a stage
are one array. This is what makes it affordable to simulate every candidate of a plan.

For very wide stages `fluid_seconds` is an estimate: each stage flows as one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from elaswave_plugin.core.planner.microbatch_split import (
    RESIZE,
    MicrobatchSplit,
    Numbers,
    StagePieces,
)
from elaswave_plugin.core.step.simulate import LinkTime, StageTime

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Overlap:
    """The messages of a slot between two stages: piece ``early[e]`` to piece ``late[e]``.

    ``of_late``: where the messages of each late piece begin; ``of_early``: those of each early one.
    """

    early: Numbers
    late: Numbers
    samples: Numbers
    of_late: Numbers
    of_early: Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """The pieces of one slot at one stage: their workers, and the order on a worker.

    ``rounds[r]`` are the pieces that are their worker's r-th of the slot; ``before`` is how they
    meet the stage before, None where both stages cut the slot alike.
    """

    worker: Numbers
    rounds: tuple[Numbers, ...]
    before: _Overlap | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotFlow:
    """A split made ready for simulation with any times and windows.

    By stage: ``samples`` of a worker in a slot, ``sizes`` of all pieces and their ``workers``, and
    ``spans``, where the pieces of each slot are.
    """

    widths: tuple[int, ...]
    samples: tuple[Numbers, ...]
    sizes: tuple[Numbers, ...]
    workers: tuple[Numbers, ...]
    spans: tuple[tuple[slice, ...], ...]
    nodes: tuple[tuple[_Node, ...], ...]
    slowness: tuple[Seconds, ...] = ()

    def peak(self, stage: int, window: int) -> int:
        """The most samples in flight on one worker of a stage; exact for the window rule."""
        table = self.samples[stage]
        sums = np.concatenate([np.zeros((1, table.shape[1]), dtype=np.int64), table.cumsum(0)])
        span = min(window, len(table))
        return int((sums[span:] - sums[:-span]).max())

    def seconds(self, times: Sequence[StageTime], link: LinkTime, windows: Sequence[int]) -> float:
        """Step time with coupled backwards; raises ValueError for windows that increase."""
        run = _Run(self, times, link)
        for stage, is_forward, slot in node_order(len(self.nodes[0]), windows):
            run.node(stage, is_forward=is_forward, slot=slot)
        return run.end()


class _Run:
    """The state of one simulation: when workers are free and when pieces were done."""

    def __init__(self, flow: SlotFlow, times: Sequence[StageTime], link: LinkTime) -> None:
        self.flow = flow
        self.times = times
        self.link = link
        self.free = [np.zeros(width) for width in flow.widths]
        num_slots = len(flow.nodes[0])
        self.forward: list[list[Seconds | None]] = [[None] * num_slots for _ in flow.widths]
        self.backward: list[list[Seconds | None]] = [[None] * num_slots for _ in flow.widths]
        # Of all slots together: small arrays cost as much as large ones.
        stages = range(len(times))
        self.forward_s = [self._durations(one, times[one].forward_s) for one in stages]
        self.backward_s = [
            self._durations(one, times[one].backward_s + times[one].weights_s) for one in stages
        ]
        self.delays = [self._by_slot(one, self._delay(flow.sizes[one])) for one in stages]

    def _durations(self, stage: int, each_s: float) -> list[Seconds]:
        """Of the pieces of each slot."""
        durations = np.asarray(self.flow.sizes[stage] * each_s, dtype=np.float64)
        durations += self.times[stage].fixed_s
        if self.flow.slowness:
            durations = durations * self.flow.slowness[stage][self.flow.workers[stage]]
        return self._by_slot(stage, durations)

    def _delay(self, samples: Numbers) -> Seconds:
        """Return the seconds that messages of ``samples`` samples take."""
        return np.asarray(self.link.latency_s + samples * self.link.sample_s, dtype=np.float64)

    def _by_slot(self, stage: int, pieces: Seconds) -> list[Seconds]:
        return [pieces[span] for span in self.flow.spans[stage]]

    def node(self, stage: int, *, is_forward: bool, slot: int) -> None:
        """Run the pieces of a slot at a stage."""
        node = self.flow.nodes[stage][slot]
        ready = self._after(stage, slot) if is_forward else self._before(stage, slot)
        duration = (self.forward_s if is_forward else self.backward_s)[stage][slot]
        free = self.free[stage]
        if len(node.rounds) == 1:
            done = np.maximum(free[node.worker], ready) + duration
            free[node.worker] = done
        else:
            done = np.empty(len(node.worker))
            for pieces in node.rounds:
                worker = node.worker[pieces]
                end = np.maximum(free[worker], ready[pieces]) + duration[pieces]
                free[worker] = end
                done[pieces] = end
        (self.forward if is_forward else self.backward)[stage][slot] = done

    def end(self) -> float:
        """Return when the last of the stages has reduced its gradients."""
        return max(
            float(np.max(free)) + time.reduce_s
            for free, time in zip(self.free, self.times, strict=True)
        )

    def _after(self, stage: int, slot: int) -> Seconds:
        """Return when activations of the stage before have arrived."""
        if stage == 0:
            return np.zeros(len(self.delays[0][slot]))
        early, overlap = self.forward[stage - 1][slot], self.flow.nodes[stage][slot].before
        assert early is not None
        if overlap is None:
            return early + self.delays[stage][slot]
        ready = early[overlap.early] + self._delay(overlap.samples)
        arrived: Seconds = np.maximum.reduceat(ready, overlap.of_late)
        return arrived

    def _before(self, stage: int, slot: int) -> Seconds:
        """Return when gradients of the stage after have arrived."""
        if stage + 1 == len(self.times):
            return np.zeros(len(self.delays[stage][slot]))
        late, overlap = self.backward[stage + 1][slot], self.flow.nodes[stage + 1][slot].before
        assert late is not None
        if overlap is None:
            return late + self.delays[stage][slot]
        ready = late[overlap.late] + self._delay(overlap.samples)
        arrived: Seconds = np.maximum.reduceat(ready, overlap.of_early)
        return arrived


def slot_flow(split: MicrobatchSplit) -> SlotFlow:
    """Make a split ready for simulation."""
    nodes: list[tuple[_Node, ...]] = []
    known: dict[bytes, tuple[Numbers, ...]] = {}
    for stage, pieces in enumerate(split.stages):
        before = split.stages[stage - 1] if stage else None
        alike = before is None or (
            before.cuts is pieces.cuts or np.array_equal(before.cuts, pieces.cuts)
        )
        nodes.append(
            tuple(
                _node(pieces, None if alike else before, slot, known)
                for slot in range(split.num_slots)
            )
        )
    return SlotFlow(
        widths=tuple(pieces.width for pieces in split.stages),
        samples=tuple(pieces.samples() for pieces in split.stages),
        sizes=tuple(np.diff(pieces.cuts) for pieces in split.stages),
        workers=tuple(pieces.worker for pieces in split.stages),
        spans=tuple(
            tuple(slice(*span) for span in pairwise(pieces.first.tolist()))
            for pieces in split.stages
        ),
        nodes=tuple(nodes),
        slowness=tuple(map(np.array, split.slowness)),
    )


def _node(
    pieces: StagePieces,
    before: StagePieces | None,
    slot: int,
    known: dict[bytes, tuple[Numbers, ...]],
) -> _Node:
    low, high = pieces.first[slot], pieces.first[slot + 1]
    worker, cuts = pieces.worker[low:high], pieces.cuts[low : high + 1]
    # Most slots are dealt alike.
    key = worker.tobytes()
    if key not in known:
        known[key] = _rounds(worker)
    overlap = None
    if before is not None:
        overlap = _overlap(before.cuts[before.first[slot] : before.first[slot + 1] + 1], cuts)
    return _Node(worker=worker, rounds=known[key], before=overlap)


def _rounds(worker: Numbers) -> tuple[Numbers, ...]:
    """The pieces that are the first of their worker, the second, and so on."""
    order = np.argsort(worker, kind="stable")
    ordered = worker[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(new)
    turn = np.arange(len(worker)) - starts[np.cumsum(new) - 1]
    return tuple(order[turn == number] for number in range(int(turn.max()) + 1))


def _overlap(early: Numbers, late: Numbers) -> _Overlap:
    """Both cut the same samples: every two neighbouring cuts of either enclose one message."""
    cuts = np.union1d(early, late)
    from_early = np.searchsorted(early, cuts[:-1], side="right") - 1
    to_late = np.searchsorted(late, cuts[:-1], side="right") - 1
    return _Overlap(
        early=from_early,
        late=to_late,
        samples=np.diff(cuts),
        of_late=np.searchsorted(to_late, np.arange(len(late) - 1)),
        of_early=np.searchsorted(from_early, np.arange(len(early) - 1)),
    )


def node_order(num_slots: int, windows: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
    """(stage, is forward, slot) in an order in which each comes after all that it waits for.

    Raises ValueError for windows that deadlock, which only increasing ones can.
    """
    last = len(windows) - 1
    forwards, backwards = [0] * len(windows), [0] * len(windows)
    awake = list(range(len(windows)))
    while awake:
        stage = awake.pop()
        while backwards[stage] < num_slots:
            # By the window rule forwards run ahead by the window, then the two take turns.
            is_forward = forwards[stage] < min(backwards[stage] + windows[stage], num_slots)
            if is_forward:
                slot, done = forwards[stage], forwards[stage - 1] if stage else num_slots
            else:
                slot = backwards[stage]
                done = forwards[stage] if stage == last else backwards[stage + 1]
            if slot >= done:
                break
            yield stage, is_forward, slot
            (forwards if is_forward else backwards)[stage] += 1
            neighbour = stage + 1 if is_forward else stage - 1
            if 0 <= neighbour <= last:
                awake.append(neighbour)
    if min(backwards) < num_slots:
        raise ValueError(f"windows {tuple(windows)} deadlock, wanted non-increasing ones")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The flow of a step: ``slot_width`` micro-batches of ``microbatch_size`` samples a slot.

    ``widths``: workers of each stage; one that takes twice as long counts a half.
    """

    policy: str
    widths: tuple[float, ...]
    num_microbatches: int
    microbatch_size: int
    slot_width: int

    @property
    def num_slots(self) -> int:
        """Slots of the step; the last one is charged as a whole one."""
        return -(-self.num_microbatches // self.slot_width)

    def shares(self) -> tuple[float, ...]:
        """Micro-batches of a full slot for each worker, by stage."""
        return tuple(self.slot_width / width for width in self.widths)


def fluid_seconds(
    flow: Flow, times: Sequence[StageTime], link: LinkTime, windows: Sequence[int]
) -> float:
    """Estimate the step seconds with coupled backwards, at the same cost for any number of workers.

    A slot of w micro-batches keeps a stage of n >= w workers busy for w / n of a micro-batch's
    time, and passes it in the time of one: that workers take whole micro-batches in turn is left
    out. Close for widths within an eighth of each other; too long for stages several times as wide
    as the narrowest one with few slots in flight, whose workers overlap more slots than the stage
    as one does. Raises ValueError for windows that deadlock, and for slots wider than the narrowest
    stage, where the rounding within a slot is what counts.
    """
    if flow.policy != RESIZE and flow.slot_width > min(flow.widths):
        raise ValueError(f"slots of {flow.slot_width} micro-batches, widths {flow.widths}")
    last_stage = len(times) - 1
    sent_s = link.seconds(flow.microbatch_size)
    free = [0.0] * len(times)
    forward_end = [[0.0] * flow.num_slots for _ in times]
    backward_end = [[0.0] * flow.num_slots for _ in times]
    work = [_seconds(flow, time, share) for time, share in zip(times, flow.shares(), strict=True)]
    for stage, is_forward, slot in node_order(flow.num_slots, windows):
        if is_forward:
            ready = forward_end[stage - 1][slot] + sent_s if stage else 0.0
        elif stage == last_stage:
            ready = forward_end[stage][slot]
        else:
            ready = backward_end[stage + 1][slot] + sent_s
        busy_s, pass_s = work[stage][0 if is_forward else 1]
        begin = max(free[stage], ready)
        free[stage] = begin + busy_s
        (forward_end if is_forward else backward_end)[stage][slot] = begin + pass_s
    return max(
        max(end, ends[-1]) + time.reduce_s
        for end, ends, time in zip(free, backward_end, times, strict=True)
    )


def _seconds(flow: Flow, time: StageTime, share: float) -> tuple[tuple[float, float], ...]:
    """For forward and backward: how long a slot occupies the stage, and takes to pass it."""
    found = []
    for each_s in (time.forward_s, time.backward_s + time.weights_s):
        if flow.policy == RESIZE:
            piece_s = time.fixed_s + share * flow.microbatch_size * each_s
            found.append((piece_s, piece_s))
        else:
            piece_s = time.fixed_s + flow.microbatch_size * each_s
            found.append((share * piece_s, piece_s))
    return tuple(found)
