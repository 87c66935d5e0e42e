"""The host memory of snapshots: of each worker of a view, and of it through the loss of one."""

from collections.abc import Collection, Sequence

from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.shards import ShardCut
from elaswave_plugin.core.recovery_plan.placement import Placement, ShardGroup
from elaswave_plugin.core.recovery_plan.plan import copy_targets
from elaswave_plugin.ipc.snapshot_record import BUFFERS
from elaswave_plugin.snapshot.snapshot_pool import capacity_of, taken_of

# Room for the step capsule (schedulers, scalers, counters) in a buffer.
CAPSULE_ROOM_BYTES = 1 << 20
# Owners whose holders are looked for, in all losses together: a fraction of a second.
_MOST_LOOKS = 4096

# Whose shards each worker has buffers for: its own, and those of workers of other nodes.
_Owners = dict[int, list[int]]


class SnapshotMemory:
    """Memory of the workers of a view: two buffers of each shard that is theirs or that they hold.

    What is held for a worker of the same node is that worker's own memory.
    """

    def __init__(
        self, view: MembershipView, placement: Placement, *, copies: int, alignment: int
    ) -> None:
        """``copies``: of each snapshot; shards are whole multiples of ``alignment`` elements.

        Of jobs beyond 64 workers only some losses are looked at, evenly over the ranks.
        """
        self._copies, self._alignment = copies, alignment
        self._node = dict(zip(view.ranks, view.nodes, strict=True))
        self._groups = {slot: one for one in placement.shard_groups for slot in one.ranks}
        self._owners = self._owners_of(view.ranks)
        count = len(view.ranks)
        every = -(-count // max(1, _MOST_LOOKS // count))
        self._after = {
            lost: self._owners_of([slot for slot in view.ranks if slot != lost])
            for lost in view.ranks[::every]
        }

    def node_of(self, slot: int) -> tuple[int, ...]:
        """List the workers that share the memory of a worker's node."""
        return tuple(one for one, node in self._node.items() if node == self._node[slot])

    @property
    def in_use(self) -> int:
        """Shared memory of the worker that takes most, in bytes, step capsules not counted."""
        return max(
            sum(BUFFERS * taken_of(self._payload(one)) for one in owners)
            for owners in self._owners.values()
        )

    @property
    def at_most(self) -> int:
        """Host memory of the worker that takes most, through the loss of one."""
        return max(self.needed((slot,)) for slot in self._owners)

    def needed(self, slots: Collection[int]) -> int:
        """Bytes that these workers take together at most, through the loss of one worker.

        Each stage has one replica fewer from then on, and layers stay. While a worker reads its new
        shard, the buffers are of the old ones; then each is replaced as it is written to. The
        agent of the lost worker keeps what it has.
        """
        reading = self._taken(self._owners, slots, fewer=0)
        reading += sum(self._payload(slot, fewer=1) for slot in slots)
        after = [
            self._taken(owners, slots, fewer=1) + self._taken(self._owners, {lost} & {*slots})
            for lost, owners in self._after.items()
        ]
        return max(reading, *after)

    def _owners_of(self, ranks: Sequence[int]) -> _Owners:
        nodes = [self._node[slot] for slot in ranks]
        owners = {slot: [slot] for slot in ranks}
        for owner in ranks:
            group = self._groups.get(owner)
            peers = () if group is None else group.ranks
            for target in copy_targets(
                owner, ranks=ranks, nodes=nodes, copies=self._copies, peers=peers
            ):
                if self._node[target] != self._node[owner]:
                    owners[target].append(owner)
        return owners

    def _taken(self, owners: _Owners, slots: Collection[int], fewer: int = 0) -> int:
        """Bytes of all buffers of these workers, each with room for the largest capsule."""
        return BUFFERS * sum(
            capacity_of(self._payload(one, fewer) + CAPSULE_ROOM_BYTES)
            for slot in slots
            for one in owners.get(slot, ())
        )

    def _payload(self, slot: int, fewer: int = 0) -> int:
        group = self._groups.get(slot)
        return 0 if group is None else payload_of(group, self._alignment, fewer)


def payload_of(group: ShardGroup, alignment: int, fewer: int = 0) -> int:
    """Bytes of the state of a shard of this group, shared by ``fewer`` workers than it has."""
    width = max(1, len(group.ranks) - fewer)
    return ShardCut(buckets=group.buckets, width=width, alignment=alignment).payload_bytes
