"""The samples of each micro-batch that each worker of a stage runs: redeal, reroute, resize.

``redeal``   slot t holds micro-batches t w .. t w + w - 1; at every stage all live workers take q
             or q + 1 of them, the least loaded ones q + 1. Equal widths give a plain pipeline. Of
             a stage with slow workers, the one that is done first takes the next one.
``reroute``  slot t holds the micro-batches of the launch's slot t; a lost replica's are spread over
             its peers (the rule of ReCycle, arXiv 2405.14009).
``resize``   the slots of the launch; each stage cuts the slot's samples evenly over its workers,
             the remainder goes round. Pieces are sample intervals and no longer micro-batches.

The other two leave slow workers what they have. In all three every sample is computed once at every
stage, so the global batch does not change; the gradient is a sum over samples divided by a fixed
count, so its scale does not either.

>>> def show(split):
...     for stage in split.assignment():
...         print(*([(piece.start, piece.stop) for piece in pieces] for pieces in stage))
>>> show(redeal(widths=(2, 1), num_microbatches=4, microbatch_size=1, slot_width=2))
[(0, 1), (2, 3)] [(1, 2), (3, 4)]
[(0, 1), (1, 2), (2, 3), (3, 4)]
>>> show(resize(widths=(3, 2), launch_width=3, num_microbatches=3, microbatch_size=2))
[(0, 2)] [(2, 4)] [(4, 6)]
[(0, 3)] [(3, 6)]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from elaswave_plugin.core.step.dataflow import FairDeal
from elaswave_plugin.core.step.schedule import Assignment, Piece
from elaswave_plugin.errors import ConfigurationError

REDEAL, REROUTE, RESIZE = "redeal", "reroute", "resize"
POLICIES = (REDEAL, REROUTE, RESIZE)

Numbers = npt.NDArray[np.int64]
# By stage and worker, how many times as long it takes; of no stage where nobody is slow.
StageSlowness = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePieces:
    """The pieces of one stage in the order of their samples.

    Piece p is samples [cuts[p], cuts[p + 1]) and runs on ``worker[p]``; slot t has the pieces
    [first[t], first[t + 1]).
    """

    width: int
    worker: Numbers
    cuts: Numbers
    first: Numbers

    def samples(self) -> npt.NDArray[np.int64]:
        """Samples of each slot on each worker, [slots, width]."""
        table = np.zeros((len(self.first) - 1, self.width), dtype=np.int64)
        slots = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        np.add.at(table, (slots, self.worker), np.diff(self.cuts))
        return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchSplit:
    """One answer of the dataflow planner."""

    policy: str
    num_microbatches: int
    microbatch_size: int
    slot_width: int
    stages: tuple[StagePieces, ...]
    slowness: StageSlowness = ()

    def __str__(self) -> str:
        width = f", {self.slot_width} micro-batches a slot" if self.policy == REDEAL else ""
        return f"{self.policy}{width}"

    @property
    def num_slots(self) -> int:
        """Slots of the step."""
        return len(self.stages[0].first) - 1

    def assignment(self) -> Assignment:
        """The pieces of every worker, as the schedule takes them."""
        result = []
        for stage in self.stages:
            workers: list[list[Piece]] = [[] for _ in range(stage.width)]
            worker, cuts = stage.worker.tolist(), stage.cuts.tolist()
            first = stage.first.tolist()
            for slot, (low, high) in enumerate(pairwise(first)):
                for piece in range(low, high):
                    workers[worker[piece]].append(Piece(slot, cuts[piece], cuts[piece + 1]))
            result.append(tuple(map(tuple, workers)))
        return tuple(result)

    def pieces(self, stage: int, worker: int) -> tuple[Piece, ...]:
        """The pieces of one worker, as `assignment` has them."""
        table = self.stages[stage]
        own = np.flatnonzero(table.worker == worker)
        slots = np.searchsorted(table.first, own, side="right") - 1
        starts, stops = table.cuts[own].tolist(), table.cuts[own + 1].tolist()
        return tuple(map(Piece, slots.tolist(), starts, stops))


def redeal(
    *,
    widths: Sequence[int],
    num_microbatches: int,
    microbatch_size: int,
    slot_width: int,
    slowness: StageSlowness = (),
) -> MicrobatchSplit:
    """Deal whole micro-batches in slots of ``slot_width``; raises ConfigurationError."""
    _check(widths, num_microbatches, microbatch_size)
    if slot_width < 1:
        raise ConfigurationError(f"slot width is {slot_width}, wanted 1 or more")
    bounds = _slots(num_microbatches, slot_width)
    return MicrobatchSplit(
        policy=REDEAL,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        slot_width=slot_width,
        slowness=slowness,
        stages=tuple(
            StagePieces(
                width=width,
                worker=_dealt(np.diff(bounds), width, slowness[stage] if slowness else ()),
                cuts=microbatch_size * np.arange(num_microbatches + 1),
                first=bounds,
            )
            for stage, width in enumerate(widths)
        ),
    )


def reroute(
    *,
    replicas: Sequence[Sequence[int]],
    launch_width: int,
    num_microbatches: int,
    microbatch_size: int,
) -> MicrobatchSplit:
    """Spread the micro-batches of lost replicas; ``replicas[s]``: the live ones of stage s, rising.

    Micro-batch k belongs to replica k mod ``launch_width``. Raises ConfigurationError.
    """
    _check([len(live) for live in replicas], num_microbatches, microbatch_size)
    stages = []
    for live in replicas:
        coordinates = {replica: coordinate for coordinate, replica in enumerate(live)}
        orphans = [k for k in range(num_microbatches) if k % launch_width not in coordinates]
        worker = np.zeros(num_microbatches, dtype=np.int64)
        for replica, coordinate in coordinates.items():
            worker[replica::launch_width] = coordinate
        # In turn: no peer takes a second one before all of them have taken the first.
        worker[orphans] = np.arange(len(orphans)) % len(live)
        stages.append(
            StagePieces(
                width=len(live),
                worker=worker,
                cuts=microbatch_size * np.arange(num_microbatches + 1),
                first=_slots(num_microbatches, launch_width),
            )
        )
    return MicrobatchSplit(
        policy=REROUTE,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        slot_width=launch_width,
        stages=tuple(stages),
    )


def resize(
    *, widths: Sequence[int], launch_width: int, num_microbatches: int, microbatch_size: int
) -> MicrobatchSplit:
    """Cut the samples of every slot evenly over each stage's workers; ConfigurationError."""
    _check(widths, num_microbatches, microbatch_size)
    slots = microbatch_size * _slots(num_microbatches, launch_width)
    return MicrobatchSplit(
        policy=RESIZE,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        slot_width=launch_width,
        stages=tuple(_intervals(slots, width) for width in widths),
    )


def _intervals(slots: Numbers, width: int) -> StagePieces:
    """Contiguous intervals by worker; the remainder of slot t starts where the last one ended."""
    workers, sizes, first, turn = [], [], [0], 0
    for size in np.diff(slots).tolist():
        each, rest = divmod(size, width)
        share = each + ((np.arange(width) - turn) % width < rest)
        turn = (turn + rest) % width
        busy = np.flatnonzero(share)
        workers.append(busy)
        sizes.append(share[busy])
        first.append(first[-1] + len(busy))
    return StagePieces(
        width=width,
        worker=np.concatenate(workers),
        cuts=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]),
        first=np.array(first),
    )


def _dealt(sizes: Numbers, width: int, slowness: Sequence[float] = ()) -> Numbers:
    """The worker of each micro-batch, slot by slot; contiguous and rising within a slot."""
    if set(slowness) - {1.0}:
        deal = FairDeal(slowness)
        taken = (sorted(deal.take() for _ in range(size)) for size in sizes.tolist())
        return np.array([worker for slot in taken for worker in slot], dtype=np.int64)
    load = np.zeros(width, dtype=np.int64)
    parts = []
    for size in sizes.tolist():
        each, rest = divmod(size, width)
        share = np.full(width, each, dtype=np.int64)
        share[np.argsort(load, kind="stable")[:rest]] += 1
        load += share
        parts.append(np.repeat(np.arange(width), share))
    return np.concatenate(parts)


def _slots(num_microbatches: int, slot_width: int) -> Numbers:
    """List where slots begin, in micro-batches, then where the last ends, which may be short."""
    return np.append(np.arange(0, num_microbatches, slot_width), num_microbatches)


def _check(widths: Sequence[int], num_microbatches: int, microbatch_size: int) -> None:
    if not widths or min(widths) < 1:
        raise ConfigurationError(
            f"stage widths are {' '.join(map(str, widths))}, wanted at least one worker in each"
        )
    if num_microbatches < 1 or microbatch_size < 1:
        raise ConfigurationError(
            f"{num_microbatches} micro-batches of {microbatch_size} samples, wanted 1 or more of"
            " each"
        )
