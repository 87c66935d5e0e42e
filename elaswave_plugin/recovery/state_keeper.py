"""A worker's part of the job's state: sealed after every step, held by others, read back."""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.agreement.hang import OUTSIDE
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.shards import ShardCut
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.recovery_plan.placement import Placement, ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, copy_targets
from elaswave_plugin.errors import ConfigurationError, SnapshotUnreadableError
from elaswave_plugin.framework import Framework
from elaswave_plugin.ipc.snapshot_record import BUFFERS
from elaswave_plugin.recovery.phases import Phases
from elaswave_plugin.recovery.record import RecoveryRecord
from elaswave_plugin.recovery.seal_interval import SealInterval
from elaswave_plugin.snapshot.free_memory import available_bytes
from elaswave_plugin.snapshot.restore import Access, DeferredMoments
from elaswave_plugin.snapshot.snapshot_pool import NotesMemory, SnapshotPool, capacity_of, taken_of
from elaswave_plugin.trainer.member import Member

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


SEAL = "snapshot"
# A smaller shard is sealed before a thread would have begun.
BESIDE_BYTES = 4 << 20


class StateKeeper:
    """Keeps the state of one worker safe, for itself and for the others."""

    def __init__(
        self, member: Member, *, config: ElasticConfig, phases: Phases, record: RecoveryRecord
    ) -> None:
        """``record`` is told how long state took that was read back behind the training."""
        self._member, self._config, self._phases, self._record = member, config, phases, record
        self.unreadable: set[SealedShard] = set()
        """Snapshots found damaged since the last seal."""
        self.live: tuple[int, int] | None = None
        """(step, epoch) of the seal at which model and optimizer still are."""
        self._seals_in_epoch = 0
        self._sealed_step: int | None = None
        # The step whose seal a recovery may read: the last one, or what was gone back to.
        self._base_step: int | None = None
        self.interval = config.fixed_interval or 1
        """Steps from one seal to the next, alike on all workers."""
        self._fit, self._seals_each_step = SealInterval(), False
        self._step_began_s: float | None = None
        # Of the seals of this epoch, those for which an update has waited.
        self._noted_seals = 0
        # Whether others were told of the last seal, in this epoch.
        self._handed_over = False
        self._deferred: DeferredMoments | None = None
        self._sealing: Future[None] | None = None
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="elaswave-seal")
        self.seals_beside = True
        """Whether what follows a step leaves its weights where they are, while they are sealed."""
        # Whether model and optimizer were about to change since the last seal.
        self.is_updated = False

    def open(self, view: MembershipView, placement: Placement, *, alignment: int) -> None:
        """Map the snapshot memory; shards are whole multiples of ``alignment`` elements.

        Raises ConfigurationError where the machine, or this process, has too little of it.
        """
        self.alignment = alignment
        self.begin_epoch(view, placement)
        if not self._config.snapshots:
            return
        self._notes = NotesMemory(self._member.snapshot_fds[BUFFERS:], slot=self._member.slot)
        copies, slot = self._config.snapshot_copies, self._member.slot
        self.memory = SnapshotMemory(view, placement, copies=copies, alignment=alignment)
        """What the workers of this view take."""
        whole = ShardCut(buckets=placement.largest, width=1, alignment=alignment)
        group = self._shard_group
        self.pool = SnapshotPool(
            self._member.snapshot_fds[:BUFFERS],
            slot=slot,
            capacity_bytes=capacity_of(whole.payload_bytes + CAPSULE_ROOM_BYTES),
            needed_bytes=self.memory.needed(self.memory.node_of(slot)),
            available_bytes=available_bytes(),
            body_bytes=0 if group is None else payload_of(group, alignment),
        )

    def begin_epoch(self, view: MembershipView, placement: Placement) -> None:
        """From now on the state is cut and held as this view has it."""
        self._view, self._shard_group = view, placement.shard_group_of(self._member.slot)
        self._seals_in_epoch, self._handed_over = 0, False
        self._noted_seals, self._step_began_s = 0, None
        # Addresses of which nothing was heard: in another view they may be heard again.
        self._unheard = set[str]()
        self._fit.interrupt()
        # An interrupted attempt may have come to its update on some workers only.
        self.is_updated = False

    # ---- sealed, and held by others -------------------------------------------------------------

    def _copy_targets(self) -> tuple[int, ...]:
        return copy_targets(
            self._member.slot,
            ranks=self._view.ranks,
            nodes=self._view.nodes,
            copies=self._config.snapshot_copies,
            peers=() if self._shard_group is None else self._shard_group.ranks,
        )

    def _is_local(self, slot: int) -> bool:
        node = dict(zip(self._view.ranks, self._view.nodes, strict=True))
        return node[slot] == node[self._member.slot]

    def seal_initial(self, framework: Framework, step: int) -> None:
        """Seal the state before the first step, once."""
        if self._sealed_step is None:
            self._seal(framework, step)
            self.finish_seal()

    def await_start(self) -> None:
        """Wait until the agents know that all workers have sealed, as all have by now.

        Until they do, a loss ends the job: it would in the first step, on a busy machine.
        """
        if self._config.snapshots:
            self._member.wait_started(self._config.transfer_timeout_s)

    def seal(self, framework: Framework, step: int) -> None:
        """Seal the state after ``step`` steps, if it is its turn, and have others hold it.

        Those of this node are told once an epoch, those of other nodes get a copy of each seal.
        """
        if self._deferred is not None:
            raise AssertionError("the state was to be sealed before its optimizer state was here")
        self.finish_seal()
        self.is_updated = False
        now_s = time.monotonic()
        if self._step_began_s is not None:
            self._fit.note_step(now_s - self._step_began_s)
        self._step_began_s = now_s
        if step % self.interval == 0:
            self._seal(framework, step)

    def seal_at_boundary(self, framework: Framework, step: int) -> None:
        """Seal the state after ``step`` steps where it is not: the view changes before the next."""
        if not self.is_sealed(step):
            # The view that is proposed has to wait for it.
            self._seal(framework, step, check=lambda: None)
            self.finish_seal()

    @property
    def is_alone(self) -> bool:
        """True if no other worker has what this one knows of its part of the model."""
        group = self._shard_group
        return self._config.snapshots and group is not None and len(group.ranks) == 1

    def has_room_for(self, notes: bytes) -> bool:
        """Return whether the machine has the memory for notes, or they have it from others."""
        return self._notes.has_room_for(notes, available_bytes=available_bytes())

    def seal_notes(self, notes: bytes, *, step: int, epoch: int) -> None:
        """Seal notes of this worker, which is alone; raises ConfigurationError.

        Other nodes hold them where the view changes, and not in each step.
        """
        assert self._shard_group is not None
        record = self._notes.seal(notes, step=step, epoch=epoch, shard_group=self._shard_group.key)
        if epoch > self._view.epoch:
            self._member.sealed(
                record, [one for one in self._copy_targets() if not self._is_local(one)]
            )

    def is_sealed(self, step: int) -> bool:
        """Return whether a recovery to ``step`` needs no older seal, once the last one is done."""
        return self._base_step == step

    def went_back(self, step: int, buffer: int) -> None:
        """The state is that after ``step`` steps again, as all have sealed it in this buffer."""
        self._base_step = step
        if self._config.snapshots:
            self.pool.go_back(buffer)

    @property
    def wanted_interval(self) -> int:
        """Steps from one seal to the next, by the settings and by what this worker has measured."""
        if self._seals_each_step:
            return 1
        return self._config.fixed_interval or self._fit.wanted

    @property
    def remembered_steps(self) -> int:
        """Steps that a recovery may take back: to a seal, or to that before if one is missing."""
        return 2 * self.interval

    def seal_each_step(self, why: str) -> None:
        """Have no step without a seal; raises ConfigurationError where the settings want some."""
        if self.interval > 1:
            raise ConfigurationError(
                f"snapshot_interval is {self.interval}, and {why}; set it to 1 or leave it out"
            )
        self._seals_each_step = True

    def _seal(
        self, framework: Framework, step: int, *, check: Callable[[], None] | None = None
    ) -> None:
        """Seal the state; ``check()`` interrupts it, by default where a view is proposed."""
        self.unreadable.clear()
        if not self._config.snapshots:
            return
        self._base_step = step
        self._seals_in_epoch += 1
        if self._seals_in_epoch == 1 and not self.is_alone:
            # The update before it was made with those that have come since: they know the loop.
            self._notes.free()
        if self._shard_group is not None:
            check = check or self._member.check
            self._seal_shard(framework, step, self._shard_group, check=check)
        if framework.keeps_state:
            self.live = step, self._view.epoch
        if self._seals_in_epoch == 2:
            # The collective between the two has shown that the first is safe everywhere.
            self._member.release(self._view.epoch)

    def _seal_shard(
        self,
        framework: Framework,
        step: int,
        shard_group: ShardGroup,
        *,
        check: Callable[[], None],
    ) -> None:
        """Seal a large shard beside the compute that follows, which does not change it."""
        first = self._seals_in_epoch == 1
        targets = [slot for slot in self._copy_targets() if first or not self._is_local(slot)]
        parts = framework.read_shard()
        is_large = 4 * sum(part.numel() for part in parts) >= BESIDE_BYTES
        beside = is_large and self.seals_beside
        write = self.pool.begin_seal(
            step=step,
            epoch=self._view.epoch,
            shard_group=shard_group.key,
            units=shard_group.units,
            ranks=shard_group.ranks,
            parts=parts,
            capsule=framework.read_capsule(),
            before_seal=self._phases.faults_of(SEAL)
            if beside
            else partial(self._enter_seal, check),
            settled=check,
        )

        def seal() -> None:
            record = write()
            self._sealed_step, self._handed_over = step, first or bool(targets)
            if self._handed_over:
                self._member.sealed(record, targets)

        if beside:
            self._phases.announce(SEAL)
            check()
            self._sealing = self._beside.submit(seal)
        else:
            seal()

    def _enter_seal(self, check: Callable[[], None]) -> None:
        self._phases.announce(SEAL)
        self._phases.fire(SEAL)
        check()

    def finish_seal(self) -> None:
        """Wait until the last seal is complete; raises what it has raised.

        Nothing that it copies may change before, and no buffer is overwritten before that a
        recovery may read.
        """
        sealing, self._sealing = self._sealing, None
        if sealing is None:
            return
        try:
            sealing.result()
        except BaseException:
            # What is in place may be what an aborted collective left.
            self.live = None
            raise

    def await_copies(self) -> None:
        """Wait until the last own snapshot is held wherever it has to be.

        All workers do so before the grad norm of the next step; that collective therefore proves
        that the step is sealed and copied everywhere, and the older buffer may be overwritten.
        """
        self.finish_seal()
        if self._handed_over and self._sealed_step is not None:
            with self._member.progress_page.waiting(OUTSIDE):
                self._member.wait_copied(
                    self._sealed_step, timeout_s=self._config.transfer_timeout_s
                )

    def begin_update(self) -> None:
        """Model and optimizer are about to change: have the state whole, and its snapshot safe."""
        self.complete()
        self._await_seal()
        self.leave_seal()
        self.is_updated = True

    def _await_seal(self) -> None:
        """Wait for the copies of the last seal, and note how long where it is a new one."""
        began_s = time.monotonic()
        self.await_copies()
        if self._noted_seals != self._seals_in_epoch:
            self._noted_seals = self._seals_in_epoch
            self._fit.note_wait(time.monotonic() - began_s)

    def leave_seal(self) -> None:
        """From here on model and optimizer are no longer what was sealed last."""
        self.finish_seal()
        self.live = None

    # ---- read back behind the training ----------------------------------------------------------

    @property
    def is_followed(self) -> bool:
        """True if some of the optimizer state is still on its way."""
        return self._deferred is not None and self._deferred.is_on_its_way

    @property
    def is_whole(self) -> bool:
        """True if all of the optimizer state is installed."""
        return self._deferred is None

    @property
    def access(self) -> Access:
        """The way to sealed state, which a recovery reads."""
        return Access(
            slot=self._member.slot,
            pool=self.pool,
            secret=self._member.secret,
            timeout_s=self._config.transfer_timeout_s,
            unheard=self._unheard,
            check=self._member.check,
        )

    def read_deferred(self, plan: RecoveryPlan, framework: Framework) -> None:
        """Have the optimizer state follow the weights, from the same snapshots.

        A snapshot is overwritten only after a grad norm of all that comes after the update.
        """
        self._deferred = DeferredMoments(plan, self.access, write=framework.write_moments)
        if not framework.moments_may_follow:
            self.complete()

    def complete(self) -> None:
        """Install the optimizer state that follows the weights, where it has not been yet.

        All workers do so before the update, and before work that may read it. Where a snapshot
        cannot be read, the view is renewed, and the next plan avoids it. Raises EpochChanged.
        """
        if self._deferred is None:
            return
        with self._member.progress_page.waiting(OUTSIDE):
            try:
                self._record.followed = self._deferred.complete()
            except SnapshotUnreadableError as error:
                self.unreadable.add(error.sealed)
                self._member.severed(self._view.epoch, str(error))
                self._member.await_proposal(timeout_s=self._config.transfer_timeout_s)
        self._deferred = None

    def drop_deferred(self) -> None:
        """Drop the state that is on its way; returns when nothing is read any longer."""
        if self._deferred is not None:
            self._deferred.drop()
            self._deferred = None
