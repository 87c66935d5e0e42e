"""Which live worker runs which micro-batches of a step, and which samples those are.

Redeal: survivors keep their own replica whole; the micro-batches of lost replicas are dealt out one
by one to the least loaded survivor. Resize, for loops whose number of iterations a step cannot
change: every worker takes part in every iteration, with a larger share of its samples. The global
batch never changes.

>>> flow = deal(num_microbatches=8, homes=(0, 1, 2, 3), live=(0, 3, 2))
>>> print(flow)
w0: 0 4 1 | w2: 2 6 5 | w3: 3 7
>>> shares = share(num_samples=8, homes=(0, 1, 2, 3), live=(0, 3, 2))
>>> print(shares, shares.weight(0))
w0: [0, 3) | w2: [3, 6) | w3: [6, 8) 1.125
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elaswave_plugin.core.exact import (
    Contribution,
    FoldTerm,
    contributions,
    fold_order,
    replica_microbatches,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """The assignment of a step: (slot, micro-batches in order of execution), by slot."""

    num_microbatches: int
    num_replicas: int
    placement: tuple[tuple[int, tuple[int, ...]], ...]

    def __str__(self) -> str:
        return " | ".join(f"w{slot}: {' '.join(map(str, ks))}" for slot, ks in self.placement)

    def microbatches(self, slot: int) -> tuple[int, ...]:
        """Micro-batches of ``slot`` in order of execution."""
        return dict(self.placement)[slot]

    def contributions(self, slot: int) -> tuple[Contribution, ...]:
        """Contributions of ``slot`` in order of execution."""
        return contributions(
            self.microbatches(slot),
            num_replicas=self.num_replicas,
            num_microbatches=self.num_microbatches,
        )

    def fold(self) -> tuple[FoldTerm, ...]:
        """The canonical order of addition at every shard owner."""
        return fold_order(
            dict(self.placement),
            num_replicas=self.num_replicas,
            num_microbatches=self.num_microbatches,
        )

    @property
    def is_healthy(self) -> bool:
        """Whether every worker runs exactly one whole replica."""
        return len(self.placement) == self.num_replicas and all(
            [part.whole for part in self.contributions(slot)] == [True]
            for slot, _ in self.placement
        )


def deal(*, num_microbatches: int, homes: Sequence[int], live: Sequence[int]) -> Dataflow:
    """Deal a step's micro-batches over the ``live`` slots; ``homes[d]`` is the slot of replica d.

    Raises ValueError when nobody is alive or there are fewer micro-batches than replicas.
    """
    if not live:
        raise ValueError("no live worker to run the step")
    if num_microbatches < len(homes):
        raise ValueError(f"{num_microbatches} micro-batches for {len(homes)} replicas")
    load: dict[int, list[int]] = {slot: [] for slot in sorted(live)}
    orphans: list[int] = []
    for replica, home in enumerate(homes):
        own = replica_microbatches(
            replica, num_replicas=len(homes), num_microbatches=num_microbatches
        )
        if home in load:
            load[home] += own
        else:
            orphans += own
    for microbatch in sorted(orphans):
        least = min(load, key=lambda slot: (len(load[slot]), slot))
        load[least].append(microbatch)
    return Dataflow(
        num_microbatches=num_microbatches,
        num_replicas=len(homes),
        placement=tuple((slot, tuple(ks)) for slot, ks in load.items()),
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
        """What ``slot``'s mean loss counts, where the gradients are averaged over the workers.

        The average of the weighted means is the mean over all samples of the iteration.
        """
        start, stop = self.interval(slot)
        return len(self.intervals) * (stop - start) / self.num_samples


def share(*, num_samples: int, homes: Sequence[int], live: Sequence[int]) -> Shares:
    """Share the ``num_samples`` of an iteration evenly over the ``live`` slots, in slot order.

    Raises ValueError when nobody is alive or a replica of the launch would have no sample.
    """
    if not live:
        raise ValueError("no live worker to run the step")
    if num_samples < len(homes):
        raise ValueError(f"{num_samples} samples for {len(homes)} replicas")
    each, rest = divmod(num_samples, len(live))
    sizes = [each + (order < rest) for order in range(len(live))]
    return Shares(
        num_samples=num_samples,
        intervals=tuple(
            (slot, sum(sizes[:order]), sum(sizes[: order + 1]))
            for order, slot in enumerate(sorted(live))
        ),
    )


def sample_ids(*, step: int, microbatch: int, num_microbatches: int, size: int) -> tuple[int, ...]:
    """Global sample ids of a micro-batch under sequential sampling; ``size`` samples each."""
    first = (step * num_microbatches + microbatch) * size
    return tuple(range(first, first + size))
