"""The canonical order in which gradient contributions are summed, independent of placement.

    A_d = ((0 + g_d) + g_{d+D0}) + g_{d+2 D0} ...      ascending micro-batch of logical replica d
    G   = ((A_0 + A_1) + A_2) ... + A_{D0-1}           element-wise, at the owner of the shard

D0 is the data-parallel width at launch; micro-batch k always belongs to replica k mod D0.
Membership decides only which worker evaluates which term, so G has the same bits after any loss.

>>> placement = {0: (0, 2), 1: (1,), 2: (3,)}      # 2 replicas, 4 micro-batches, 3 workers
>>> [str(c) for c in contributions(placement[0], num_replicas=2, num_microbatches=4)]
['replica 0 (0 2)']
>>> [str(c) for c in contributions(placement[1], num_replicas=2, num_microbatches=4)]
['single 1']
>>> for term in fold_order(placement, num_replicas=2, num_microbatches=4):
...     print(term.replica, [(slot, str(c)) for slot, c in term.chain])
0 [(0, 'replica 0 (0 2)')]
1 [(1, 'single 1'), (2, 'single 3')]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A worker's part in the reduction: a whole replica's sum, or one micro-batch."""

    replica: int
    microbatches: tuple[int, ...]
    whole: bool

    def __str__(self) -> str:
        if self.whole:
            return f"replica {self.replica} ({' '.join(map(str, self.microbatches))})"
        return f"single {self.microbatches[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldTerm:
    """The chain A_d of one replica as (slot that sends it, contribution), in order of addition."""

    replica: int
    chain: tuple[tuple[int, Contribution], ...]


def replica_microbatches(
    replica: int, *, num_replicas: int, num_microbatches: int
) -> tuple[int, ...]:
    """Micro-batches of a logical replica, ascending."""
    return tuple(range(replica, num_microbatches, num_replicas))


def contributions(
    microbatches: Sequence[int], *, num_replicas: int, num_microbatches: int
) -> tuple[Contribution, ...]:
    """Contributions of a worker that runs ``microbatches``: singles first, then whole replicas.

    A replica is whole only when this worker runs all of its micro-batches. The last one, where it
    is whole, has no successor and so stays where it was added up.
    """
    mine = set(microbatches)
    wholes: list[Contribution] = []
    singles: list[Contribution] = []
    for replica in range(num_replicas):
        of_replica = replica_microbatches(
            replica, num_replicas=num_replicas, num_microbatches=num_microbatches
        )
        if of_replica and mine.issuperset(of_replica):
            wholes.append(Contribution(replica=replica, microbatches=of_replica, whole=True))
        else:
            singles += [
                Contribution(replica=replica, microbatches=(k,), whole=False)
                for k in of_replica
                if k in mine
            ]
    singles.sort(key=lambda single: single.microbatches)
    return (*singles, *wholes)


def fold_order(
    placement: Mapping[int, Sequence[int]], *, num_replicas: int, num_microbatches: int
) -> tuple[FoldTerm, ...]:
    """The additions a shard owner makes, in order, for slot -> micro-batches.

    A replica may be left out. Raises ValueError unless every micro-batch of the others is placed
    exactly once.
    """
    placed = sorted(k for microbatches in placement.values() for k in microbatches)
    replicas = {k % num_replicas for k in placed}
    if placed != [k for k in range(num_microbatches) if k % num_replicas in replicas]:
        raise ValueError(f"micro-batches placed {placed}, wanted each of {num_microbatches} once")
    chains: dict[int, list[tuple[int, Contribution]]] = {d: [] for d in range(num_replicas)}
    for slot, microbatches in placement.items():
        for part in contributions(
            microbatches, num_replicas=num_replicas, num_microbatches=num_microbatches
        ):
            chains[part.replica].append((slot, part))
    return tuple(
        FoldTerm(
            replica=replica, chain=tuple(sorted(chain, key=lambda link: link[1].microbatches[0]))
        )
        for replica, chain in chains.items()
        if chain
    )
