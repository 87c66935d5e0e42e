"""The copies of a worker's snapshots: a copier for each other holder, and news for its trainer.

Standard library only. Copiers have threads of their own; the control loop calls everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.frames import Copied, Copying
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.supervisor.peers.rendezvous import RendezvousSpec
from elaswave_plugin.supervisor.snapshot_server import SnapshotCopier
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore
from elaswave_plugin.tracking.events import EventLog


class Copies:
    """Has other supervisors hold what is sealed in `store`; `peers`: those of the job by slot."""

    def __init__(
        self,
        store: SnapshotStore,
        peers: Sequence[Peer],
        *,
        rendezvous: RendezvousSpec,
        tell: Callable[[WireMessage], None],
        events: EventLog,
    ) -> None:
        """`rendezvous`: the own one; `tell(message)`, from any thread, is for the trainer."""
        self._store = store
        self._peers = peers
        self._rendezvous = rendezvous
        self._tell = tell
        self._events = events
        self._copiers: dict[int, SnapshotCopier] = {}

    def send(self, record: SealedShard, targets: Collection[int]) -> None:
        """Have the supervisors of these slots hold it, and no others what comes after it."""
        for former in self._copiers.keys() - set(targets):
            self._close(former)
        for target in targets:
            if target not in self._copiers:
                self._copiers[target] = self._open(target)
            self._copiers[target].send(record)

    def peer_replaced(self, slot: int) -> None:
        """Another supervisor has the slot: copies go there from now on."""
        if slot in self._copiers:
            self._close(slot)

    def _close(self, target: int) -> None:
        self._copiers.pop(target).close()

    def _open(self, target: int) -> SnapshotCopier:
        peer = self._peers[target]
        return SnapshotCopier(
            self._store,
            peer.data,
            secret=self._rendezvous.secret,
            same_node=peer.node == self._rendezvous.node,
            relays=[one.data for one in self._peers if one.node != self._rendezvous.node],
            on_copied=partial(self._copied, target),
            on_broken=partial(self._broken, target),
            on_moving=partial(self._moving, target),
        )

    def _copied(self, target: int, step: int, epoch: int) -> None:
        self._tell(Copied(step=step, epoch=epoch, slot=target))

    def _moving(self, target: int) -> None:
        self._tell(Copying(slot=target))

    def _broken(self, target: int, why: str) -> None:
        # The end of the target itself comes over its control link; this is only for the record.
        self._events.emit("copy_broken", slot=self._store.slot, to=target, why=why)
