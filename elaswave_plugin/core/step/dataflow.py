"""The deal of a step's micro-batches, and of their samples, over the live workers.

Redeal: survivors keep their own replica whole; the micro-batches of lost replicas are dealt out one
by one to the least loaded survivor. Slow workers give some of theirs away, so that all are done at
about the same time. Resize, for loops in which the number of iterations of a step cannot change:
every worker takes part in every iteration, with a larger share of its samples. The global batch
never changes.

>>> flow = deal(num_microbatches=8, launch_slots=(0, 1, 2, 3), live=(0, 2, 3))
>>> print(flow)
w0: 0 4 1 | w2: 2 6 5 | w3: 3 7
>>> print(deal(num_microbatches=8, launch_slots=(0, 1), live=(0, 1), slow={1: 3.0}))
w0: 0 2 4 6 5 7 | w1: 1 3
>>> print(deal(num_microbatches=8, launch_slots=(0, 1, 2, 3), live=(0, 2, 3), whole=True))
w0: 0 4 1 5 | w2: 2 6 | w3: 3 7
>>> shares = share(num_samples=8, launch_slots=(0, 1, 2, 3), live=(0, 2, 3))
>>> print(shares, shares.weight(0))
w0: [0, 3) | w2: [3, 6) | w3: [6, 8) 1.125
>>> print(share(num_samples=8, launch_slots=(0, 1, 2, 3), live=(0, 2, 3), most={0: 1.0}))
w0: [0, 2) | w2: [2, 5) | w3: [5, 8)
>>> for one in crossings([[(0, 3)], [(3, 6)]], [[(0, 6)]]):
...     print(one)
[0, 3) from 0 to 0
[3, 6) from 1 to 0
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil
from typing import NamedTuple, TypeVar

from elaswave_plugin.core.step.sum_order import (
    Contribution,
    FoldTerm,
    contributions,
    fold_order,
    replica_microbatches,
)
from elaswave_plugin.errors import ConfigurationError


class FairDeal:
    """A deal of pieces one by one; ``slowness``: seconds of a piece by worker, 1 is usual.

    ``most``: pieces that each may have, from 1 on.
    """

    def __init__(self, slowness: Sequence[float], most: Sequence[int] = ()) -> None:
        self._slowness, self._most = slowness, most
        # Workers without any piece come first; then by the time of completion, then by index.
        self._next = [(False, seconds, index, 1) for index, seconds in enumerate(slowness)]
        heapify(self._next)

    def take(self) -> int:
        """Give the next piece to a worker; return its position."""
        _, _, index, count = heappop(self._next)
        if not self._most or count < self._most[index]:
            heappush(self._next, (True, (count + 1) * self._slowness[index], index, count + 1))
        return index


def fair_counts(total: int, slowness: Sequence[float], most: Sequence[int] = ()) -> list[int]:
    """Return the number of ``total`` equal pieces that each worker gets, so that all end early.

    Each piece goes to the worker that would finish it first, which is optimal for equal pieces.
    Every worker gets one: a worker with nothing to do shows no pace, and would count as slow
    forever. ``most``: what each may have; all of them together at least ``total``.

    >>> fair_counts(8, [1.0, 1.0])
    [4, 4]
    >>> fair_counts(8, [1.0, 3.0])
    [6, 2]
    >>> fair_counts(8, [1.0, 1.0, 1.0], most=[2, 8, 8])
    [2, 3, 3]
    >>> slowest_seconds(8, [1.0, 3.0]), round(fair_width([1.0, 3.0]), 2)
    (6.0, 1.33)
    """
    deal, counts = FairDeal(slowness, most), [0] * len(slowness)
    for _ in range(total):
        counts[deal.take()] += 1
    return counts


def slowest_seconds(total: int, slowness: Sequence[float]) -> float:
    """Return when the last worker has done its share of ``total``, in pieces of a usual worker."""
    counts = fair_counts(total, slowness)
    return max(count * each for count, each in zip(counts, slowness, strict=True))


def fair_width(slowness: Sequence[float]) -> float:
    """Return how many usual workers would be as fast, if pieces were arbitrarily small."""
    return sum(1 / each for each in slowness)


Work = TypeVar("Work")
# The factor by which a micro-batch takes longer, by slot; slow ones only.
Slowness = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """The assignment of a step: (slot, micro-batches in order of execution), by slot.

    ``beyond``: some of the workers are in slots of the reserve.
    """

    num_microbatches: int
    num_replicas: int
    placement: tuple[tuple[int, tuple[int, ...]], ...]
    beyond: bool = False

    def __str__(self) -> str:
        return " | ".join(f"w{slot}: {' '.join(map(str, ks))}" for slot, ks in self.placement)

    def microbatches(self, slot: int) -> tuple[int, ...]:
        """Micro-batches of ``slot`` in order of execution."""
        return dict(self.placement)[slot]

    def without(self, replicas: Collection[int]) -> "Dataflow":
        """Return what is left of it without the micro-batches of some replicas.

        >>> print(deal(num_microbatches=4, launch_slots=(0, 1), live=(0,)).without({1}))
        w0: 0 2
        """
        return replace(
            self,
            placement=tuple(
                (slot, tuple(k for k in ks if k % self.num_replicas not in replicas))
                for slot, ks in self.placement
            ),
        )

    def contributions(self, slot: int) -> tuple[Contribution, ...]:
        """Contributions of ``slot`` in order of execution: its own replica comes last.

        A loss then finds its sum where a worker has it while healthy.

        >>> flow = deal(num_microbatches=4, launch_slots=(0, 1), live=(0,))
        >>> print(*flow.contributions(0), sep=", ")
        replica 1 (1 3), replica 0 (0 2)
        """
        dealt = self.microbatches(slot)
        parts = contributions(
            dealt, num_replicas=self.num_replicas, num_microbatches=self.num_microbatches
        )
        own = dealt[0] % self.num_replicas if dealt else None
        return tuple(sorted(parts, key=lambda part: part.whole and part.replica == own))

    def in_place(self, slot: int) -> Contribution | None:
        """The whole replica that ``slot`` runs last and so has in its gradients; None without."""
        last = self.contributions(slot)[-1:]
        return last[0] if last and last[0].whole else None

    @property
    def sent_apart(self) -> int:
        """The most contributions of a worker beside the one that its gradients hold in the end."""
        if self.is_healthy:
            return 0
        return max(
            len(self.contributions(slot)) - (self.in_place(slot) is not None)
            for slot, _ in self.placement
        )

    def fold(self) -> tuple[FoldTerm, ...]:
        """The canonical order of addition at every shard owner."""
        return fold_order(
            dict(self.placement),
            num_replicas=self.num_replicas,
            num_microbatches=self.num_microbatches,
        )

    def seconds(self, slow: Slowness) -> float:
        """Return when the last worker is done, in micro-batches of a usual one."""
        return max(len(ks) * slow.get(slot, 1.0) for slot, ks in self.placement)

    @property
    def is_healthy(self) -> bool:
        """True if every worker runs exactly one whole replica, that of its rank.

        A worker of the reserve may have a whole replica, too, but at another rank.
        """
        if self.beyond or len(self.placement) != self.num_replicas:
            return False
        dealt = (self.contributions(slot) for slot, _ in self.placement)
        own = ([(part.whole, part.replica) for part in parts] for parts in dealt)
        return all(parts == [(True, rank)] for rank, parts in enumerate(own))

    def rotated(self, *, spread: bool) -> "Dataflow":
        """Return the same work, each micro-batch by another worker; unchanged if not healthy.

        ``spread``: a replica's micro-batches go to several workers, if there are three or more.

        >>> flow = deal(num_microbatches=6, launch_slots=(0, 1, 2), live=(0, 1, 2))
        >>> print(flow.rotated(spread=False))
        w0: 2 5 | w1: 0 3 | w2: 1 4
        >>> print(flow.rotated(spread=True))
        w0: 2 4 | w1: 0 5 | w2: 1 3
        """
        if not self.is_healthy:
            return self
        slots, shares = zip(*self.placement, strict=True)
        placement = tuple(zip(slots, rotated(shares, spread=spread), strict=True))
        return replace(self, placement=placement)


def rotated(shares: Sequence[Sequence[Work]], *, spread: bool) -> tuple[tuple[Work, ...], ...]:
    """Deal equal shares of replicas so that each worker has shares of others."""
    width = len(shares)
    shifts = [1 + number % max(1, width - 1) if spread else 1 for number in range(len(shares[0]))]
    return tuple(
        tuple(shares[(own - shift) % width][number] for number, shift in enumerate(shifts))
        for own in range(width)
    )


def deal(
    *,
    num_microbatches: int,
    launch_slots: Sequence[int],
    live: Sequence[int],
    slow: Slowness | None = None,
    whole: bool = False,
) -> Dataflow:
    """Deal a step's micro-batches over the ``live`` slots; replica d has ``launch_slots[d]``.

    A worker of the reserve has no replica of its own, and gets its share of those of others.
    ``whole``: one worker runs each replica, however slow, as its micro-batches need what the one
    before has left.
    Raises ValueError when no worker lives or there are fewer micro-batches than replicas or than
    workers.
    """
    if not live:
        raise ValueError("no live worker to run the step")
    if num_microbatches < len(launch_slots):
        raise ValueError(f"{num_microbatches} micro-batches for {len(launch_slots)} replicas")
    if num_microbatches < len(live):
        raise ValueError(f"{num_microbatches} micro-batches for {len(live)} workers")
    slots = sorted(live)
    if whole:
        placement = _hosted(num_microbatches, launch_slots, slots)
        return _flow(num_microbatches, launch_slots, placement)
    counts = fair_counts(num_microbatches, _seconds(slots, slow))
    room = dict(zip(slots, counts, strict=True))
    load: dict[int, list[int]] = {slot: [] for slot in slots}
    orphans: list[int] = []
    for replica, home in enumerate(launch_slots):
        own = replica_microbatches(
            replica, num_replicas=len(launch_slots), num_microbatches=num_microbatches
        )
        kept = room.get(home, 0)
        if home in load:
            load[home] += own[:kept]
        orphans += own[kept:]
    for microbatch in sorted(orphans):
        free = (slot for slot in slots if len(load[slot]) < room[slot])
        least = min(free, key=lambda slot: (len(load[slot]), slot))
        load[least].append(microbatch)
    return _flow(num_microbatches, launch_slots, load)


def _hosted(
    num_microbatches: int, launch_slots: Sequence[int], slots: Sequence[int]
) -> dict[int, list[int]]:
    """Return the micro-batches by slot; a lost replica goes to the slot that has the fewest."""
    load: dict[int, list[int]] = {slot: [] for slot in slots}
    lost = [replica for replica, home in enumerate(launch_slots) if home not in load]
    own = [replica for replica, home in enumerate(launch_slots) if home in load]
    for replica in (*own, *lost):
        home = launch_slots[replica]
        host = home if home in load else min(slots, key=lambda slot: (len(load[slot]), slot))
        load[host] += replica_microbatches(
            replica, num_replicas=len(launch_slots), num_microbatches=num_microbatches
        )
    return load


def _flow(
    num_microbatches: int, launch_slots: Sequence[int], load: Mapping[int, Sequence[int]]
) -> Dataflow:
    return Dataflow(
        num_microbatches=num_microbatches,
        num_replicas=len(launch_slots),
        placement=tuple((slot, tuple(ks)) for slot, ks in load.items()),
        beyond=not load.keys() <= set(launch_slots),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The assignment of every iteration: (slot, start, stop) of its samples, by slot.

    While healthy every interval is the micro-batch of one replica, and all weights are 1.
    """

    num_samples: int
    intervals: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        return " | ".join(f"w{slot}: [{start}, {stop})" for slot, start, stop in self.intervals)

    def interval(self, slot: int) -> tuple[int, int]:
        """Samples [start, stop) of ``slot`` within an iteration."""
        return next((start, stop) for one, start, stop in self.intervals if one == slot)

    def weight(self, slot: int) -> float:
        """Return the weight of ``slot``'s mean loss when gradients are averaged over the workers.

        The average of the weighted means is the mean over all samples of the iteration.
        """
        start, stop = self.interval(slot)
        return len(self.intervals) * (stop - start) / self.num_samples

    def seconds(self, slow: Slowness) -> float:
        """Return when the last worker is done with an iteration, in samples of a usual one."""
        return max((stop - start) * slow.get(slot, 1.0) for slot, start, stop in self.intervals)


def share(
    *,
    num_samples: int,
    launch_slots: Sequence[int],
    live: Sequence[int],
    slow: Slowness | None = None,
    most: Mapping[int, float] | None = None,
) -> Shares:
    """Share the ``num_samples`` of an iteration over the ``live`` slots, in slot order.

    Evenly, except for slow ones, and those that may have at ``most`` this multiple of their share
    of the launch. Raises ValueError when no worker lives or a replica of the launch would have no
    sample, ConfigurationError where all together may not have that many.
    """
    if not live:
        raise ValueError("no live worker to run the step")
    if num_samples < len(launch_slots):
        raise ValueError(f"{num_samples} samples for {len(launch_slots)} replicas")
    whole, slots = num_samples / len(launch_slots), sorted(live)
    # Of a smaller iteration no fewer together, and no more each.
    room = [ceil((most or {}).get(slot, len(launch_slots)) * whole - 1e-9) for slot in slots]
    if sum(room) < num_samples:
        raise ConfigurationError(
            f"an iteration has {num_samples} samples, and the {len(slots)} workers that are left"
            f" have memory for {sum(room)}"
        )
    sizes = fair_counts(num_samples, _seconds(slots, slow), room)
    return Shares(
        num_samples=num_samples,
        intervals=tuple(
            (slot, sum(sizes[:order]), sum(sizes[: order + 1])) for order, slot in enumerate(slots)
        ),
    )


def _seconds(slots: Sequence[int], slow: Slowness | None) -> list[float]:
    return [1.0 if slow is None else slow.get(slot, 1.0) for slot in slots]


def sample_ids(*, step: int, microbatch: int, num_microbatches: int, size: int) -> tuple[int, ...]:
    """Global sample ids of a micro-batch under sequential sampling; ``size`` samples each."""
    first = (step * num_microbatches + microbatch) * size
    return tuple(range(first, first + size))


class Rows(NamedTuple):
    """Rows [start, stop) of one micro-batch."""

    microbatch: int
    start: int
    stop: int


class Samples(NamedTuple):
    """Samples [start, stop) of a step's global batch."""

    start: int
    stop: int

    @classmethod
    def of(cls, microbatch: int, *, size: int) -> "Samples":
        """Return the samples of a whole micro-batch."""
        return cls(microbatch * size, (microbatch + 1) * size)

    def rows(self, *, size: int) -> tuple[Rows, ...]:
        """List the rows that they are in micro-batches of ``size`` samples, rising."""
        touched = range(self.start // size, -(-self.stop // size))
        return tuple(
            Rows(k, max(self.start - k * size, 0), min(self.stop - k * size, size)) for k in touched
        )


class Crossing(NamedTuple):
    """Samples [start, stop) on the way from a worker of one stage to a worker of the next.

    Activations go from ``sender`` to ``receiver``, their gradients back; both are the worker's
    order within its stage.
    """

    start: int
    stop: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}) from {self.sender} to {self.receiver}"


# Sample intervals of each worker of a stage.
Intervals = Sequence[Sequence[tuple[int, int]]]


def crossings(upstream: Intervals, downstream: Intervals) -> tuple[Crossing, ...]:
    """List everything that passes between two stages, in the order of the samples.

    One for each overlap of an interval of the one with an interval of the other; both leave the
    same samples out, if any. Raises ValueError unless they run the same samples, each once.
    """
    before, after = list(_in_order(upstream)), list(_in_order(downstream))
    ran = [_without_seams(stage) for stage in (before, after)]
    if ran[0] != ran[1]:
        raise ValueError("two stages run the samples {} and {}".format(*ran))
    found: list[Crossing] = []
    first = second = 0
    while first < len(before):
        (low, high, sender), (start, stop, receiver) = before[first], after[second]
        found.append(Crossing(max(low, start), min(high, stop), sender, receiver))
        first, second = first + (high <= stop), second + (stop <= high)
    return tuple(found)


def _without_seams(stage: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Join what follows on each other."""
    joined: list[list[int]] = []
    for start, stop, _ in stage:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined


def _in_order(stage: Intervals) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, worker), rising."""
    intervals = sorted((*one, worker) for worker, mine in enumerate(stage) for one in mine)
    reached = intervals[0][0] if intervals else 0
    for start, stop, worker in intervals:
        if start < reached or stop <= start:
            raise ValueError(f"a stage runs [{start}, {stop}) after the samples before {reached}")
        reached = stop
        yield start, stop, worker
