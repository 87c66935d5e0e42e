"""The copies of a worker's snapshots: a copier for each other holder, and news for its trainer.

Standard library only. Copiers have threads of their own; the control loop calls everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from elaswave_plugin.agent.common import Common
from elaswave_plugin.agent.snapshot_server import SnapshotCopier
from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.frames import Copied, Copying


class Copies:
    """Has other nodes hold what is sealed by the worker of one slot.

    Slots of this node hold it as it is: the memory is the guardian's.
    """

    def __init__(self, common: Common, slot: int, *, tell: Callable[[WireMessage], None]) -> None:
        """`tell(message)`, from any thread, is for the trainer."""
        self._common = common
        self._slot = slot
        self._tell = tell
        # By the slot that holds it, with the node that has the slot.
        self._copiers: dict[int, tuple[int, SnapshotCopier]] = {}

    def send(self, record: SealedShard, targets: Collection[int]) -> None:
        """Have these slots hold it, and no others what comes after it."""
        for former in self._copiers.keys() - set(targets):
            self._close(former)
        for target in targets:
            node = self._common.agreement.nodes.of_slots[target]
            if node == self._common.node:
                self._copied(target, record.step, record.epoch)
                continue
            if target in self._copiers and self._copiers[target][0] != node:
                self._close(target)
            if target not in self._copiers:
                self._copiers[target] = node, self._open(target, node)
            self._copiers[target][1].send(record)

    def close(self) -> None:
        """Copy nothing more."""
        for target in list(self._copiers):
            self._close(target)

    def _close(self, target: int) -> None:
        self._copiers.pop(target)[1].close()

    def _open(self, target: int, node: int) -> SnapshotCopier:
        common = self._common
        addresses, own = common.agreement.addresses, common.node
        return SnapshotCopier(
            common.store,
            addresses[node],
            target,
            secret=common.spec.rendezvous.secret,
            relays=[address for other, address in addresses.items() if other not in (own, node)],
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
        self._common.events.emit("copy_broken", slot=self._slot, to=target, why=why)
