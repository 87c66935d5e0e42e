"""A trainer's side of an elastic job: joins, keeps the view, seals snapshots, guards the work."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Unpack

from elaswave_plugin import __version__
from elaswave_plugin.config import ElasticConfig, check_given, parse_kill
from elaswave_plugin.core.dataflow import Shares
from elaswave_plugin.core.due import LAST_CALL
from elaswave_plugin.core.hang import COMMIT, OUTSIDE
from elaswave_plugin.core.layer_times import PassTimes, agreed
from elaswave_plugin.core.pipeline_flow import PipelineFlow
from elaswave_plugin.core.plan import Flow, RecoveryPlan, copy_targets, make_plan
from elaswave_plugin.core.reserve import built_among, replicas_beyond
from elaswave_plugin.core.seating import Cell, FlatSeating, GridSeating, Seating
from elaswave_plugin.core.shards import ShardCut
from elaswave_plugin.core.slow import slowness_told
from elaswave_plugin.core.worker_facts import SlowTold, WorkerFacts
from elaswave_plugin.errors import SnapshotUnreadableError
from elaswave_plugin.runtime.behind import MomentsBehind
from elaswave_plugin.runtime.broken_links import BrokenLinks
from elaswave_plugin.runtime.framework import Framework
from elaswave_plugin.runtime.free_memory import available_bytes
from elaswave_plugin.runtime.links import LinkTable
from elaswave_plugin.runtime.member import Alone, Commit, Member
from elaswave_plugin.runtime.phases import Phases
from elaswave_plugin.runtime.process_group import GroupTable, check_growing_groups
from elaswave_plugin.runtime.progress import PhaseClock
from elaswave_plugin.runtime.recovery_record import RecoveryRecord
from elaswave_plugin.runtime.remembered import Remembered
from elaswave_plugin.runtime.reserve import read_reserve
from elaswave_plugin.runtime.slow_workers import SlowWorkers
from elaswave_plugin.runtime.snapshot import SnapshotPool, capacity_of
from elaswave_plugin.runtime.stopwatch import Stopwatch
from elaswave_plugin.tracking.events import EventLog

# Room for the step capsule (schedulers, scalers, counters) in a buffer.
CAPSULE_ROOM_BYTES = 1 << 20
# Deals the work of a step; takes what the seating says that it is dealt over.
Deal = Callable[..., Flow]
# Longer than the launcher's own limit for the meeting, whose message is the better one.
JOIN_TIMEOUT_S = 3600.0


class Worker:
    """One member of the job; everything of it that is not framework-specific."""

    def __init__(
        self,
        *,
        config: ElasticConfig,
        environ: Mapping[str, str],
        model_parallel: tuple[int, int] = (1, 1),
    ) -> None:
        """Join the job that the supervisor belongs to; blocks until the first view is committed.

        ``model_parallel``: the sizes of tp and pp, by which slots beyond the launch have places.
        In the place of a lost worker nothing is waited for: the framework is built at the sizes of
        the launch, `alone`, and `ask_to_enter` comes before the first step.
        Raises ConfigurationError when the process was not started by a supervisor.
        """
        self.config = config
        self.member = Member.from_environment(environ)
        self.local_workers = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        self.slot = self.member.slot
        self.reserve = read_reserve(environ)
        """So many workers may join beyond those of the launch."""
        self._tp, self._pp = model_parallel
        directory = config.dir
        self.events = EventLog(directory / "events.jsonl" if directory else None)
        self.ledger = EventLog(directory / "ledger.jsonl" if directory else None)
        self.steps = EventLog(directory / "steps.jsonl" if directory else None)
        broken_links = BrokenLinks(self.member)
        self.links = LinkTable(
            self.slot,
            host=self.member.host,
            on_link_lost=lambda slot, why: broken_links.report(
                slot, why, epoch=self.view.epoch, step=self.completed
            ),
            progress=self.member.progress_page,
        )
        self.groups = GroupTable(
            self.links, gpu_engine=config.gpu_engine, exact=config.consistency == "exact"
        )
        self.phases = self._timed_phases()
        self.last_call = False  # whether all were told to leave, by the newest commit
        self.completed = 0
        self.stopwatch = Stopwatch(
            PassTimes(),
            waited=lambda: self.links.waited_s,
            is_followed=lambda: self._behind is not None and self._behind.is_on_its_way,
        )
        self.slow_workers = SlowWorkers(self)
        self._seals_in_epoch, self._has_sealed = 0, False
        self._behind: MomentsBehind | None = None
        # (step, epoch) of the seal at which model and optimizer still are.
        self._live: tuple[int, int] | None = None
        # (holder, owner, step) of snapshots found damaged since the last seal.
        self._unreadable: set[tuple[int, int, int]] = set()
        self._handed_over_step = -1
        self._record = RecoveryRecord(slot=self.slot, events=self.events, phases=self.phases)
        self._entering, self._ready_s = False, 0.0
        self._newcomers: tuple[str, ...] = ()
        self._started_s = time.time()
        self._join()

    def _timed_phases(self) -> Phases:
        page, config = self.member.progress_page, self.config
        return Phases(
            slot=self.slot,
            incarnation=self.member.incarnation,
            events=self.events,
            kills=tuple(map(parse_kill, config.kill)),
            check=self.member.check,
            page=page,
            clock=PhaseClock(
                page,
                floor_s=config.hang_timeout_s,
                recovery_s=config.transfer_timeout_s,
                data_floor_s=config.data_timeout_s,
            ),
        )

    def _join(self) -> None:
        """Take part in the first view, or build alone from what the job remembers."""
        config = self.config
        self.member.start(self._ring)
        respawn = config.respawn if config.snapshots else 0
        given = {"elaswave_plugin": __version__, **config.of_the_job()}
        run_id = config.run_id or uuid.uuid4().hex[:8]
        facts = replace(self._facts(), run_id=run_id, given=given)
        welcome = self.member.join(facts, timeout_s=JOIN_TIMEOUT_S, respawn=respawn)
        self.homes = welcome.view.ranks
        # One that came beyond the launch builds as one of the launch does.
        ranks = built_among(self.slot, self.homes, tp=self._tp, pp=self._pp)
        self.view = replace(welcome.view, ranks=ranks)
        self.seating: Seating = FlatSeating(homes=self.homes, ranks=self.view.ranks)
        # What a replacement cannot learn from the others, since it builds alone.
        self.remembered: Remembered = {}
        if isinstance(welcome, Alone):
            check_given({"the job": welcome.remembered["given"], "who comes": given})
            self.alone = self.links.alone = True
            self.remembered = welcome.remembered
            self.run_id = self.remembered["run_id"]
            self.groups.launched_on = dict(self.remembered["devices"])
        else:
            self.alone = False
            facts_of = sorted(welcome.facts.items())
            check_given({f"worker {slot}": told.given for slot, told in facts_of})
            self._open_links(welcome)
            # One run id over the whole job: the one that the first owner of rank 0 proposed.
            self.run_id = welcome.facts[self.homes[0]].run_id
            self.remember(run_id=self.run_id, given=given)

    # ---- the view -----------------------------------------------------------------------------

    def _ring(self, epoch: int, reason: str) -> None:
        """Doorbell: runs in the member's thread the moment a view is proposed."""
        self.links.interrupt(epoch, reason)

    def _facts(self) -> WorkerFacts:
        return WorkerFacts(
            address=self.links.address,
            communicators=self.groups.device_facts(),
            step=self.completed,
            unreadable=tuple(sorted(self._unreadable)),
            told_to_leave=self.member.told_to_leave,
        )

    def _told(self) -> WorkerFacts:
        """The facts of a worker that has a view: also where it is, and how fast."""
        return replace(
            self._facts(),
            seated_epoch=self.view.epoch,
            seating=self.seating.told(),
            times=self.stopwatch.times.medians(),
            slow=self.slow_workers.told(),
            cuts_wanted=self.member.cuts_wanted,
            live=self._live,
        )

    @property
    def spare_width(self) -> int:
        """So many replicas may every stage have beyond those of the launch."""
        return replicas_beyond(self.reserve, tp=self._tp, pp=self._pp)

    @property
    def owns_rank_0(self) -> bool:
        """Whether the duties of rank 0 are this worker's now."""
        return self.view.ranks[0] == self.slot and not self.alone

    def remember(self, **what: Unpack[Remembered]) -> None:
        """Keep what the job fixed at its start for whoever may have to replace this worker."""
        self.remembered |= what
        self.member.remember(what)

    def ask_to_enter(self) -> None:
        """All is built: the next recovery lets this worker in, at the boundary before a step."""
        self._entering, self._ready_s = True, time.time()
        self.member.ready(self._told())

    def _open_links(self, commit: Commit) -> None:
        addresses = {slot: facts.address for slot, facts in commit.facts.items()}
        self.links.open_epoch(commit.view.epoch, addresses)
        self.member.progress_page.set_place(epoch=commit.view.epoch)

    def quiesce(self) -> Commit:
        """Answer the open proposal and wait for its commit; what was on its way is dropped."""
        if self._behind is not None:
            self._behind.drop()
            self._behind = None
        with self.member.progress_page.waiting(COMMIT):
            return self.member.quiesce(self._told())

    def install_view(self, commit: Commit) -> None:
        """Edit every group in place to the committed view and start its epoch."""
        self._seals_in_epoch = 0
        self._open_links(commit)
        told_slow = self._follow_views(commit)
        before = commit.path[-2] if len(commit.path) > 1 else self.view
        self._newcomers = tuple(sorted(map(str, commit.view.workers - before.workers)))
        self.alone = False
        # A failure meanwhile finds some of them a step further on: only that view finds all alike.
        all_told = all(told.told_to_leave for told in commit.facts.values())
        self.last_call = commit.view.reason == LAST_CALL or (self.last_call and all_told)
        self.view = commit.view
        self.slow_workers.learn(told_slow)
        edits = self.seating.edits(self.groups.launched(), self.slot)
        self.groups.edit_groups(commit.view.ranks, edits)
        self.groups.settle({slot: told.communicators for slot, told in commit.facts.items()})

    def _follow_views(self, commit: Commit) -> tuple[SlowTold, ...]:
        """Apply the views that nobody has applied yet to the seating of who has applied most.

        A worker that was not there cannot tell the seating from the views: it also depends on what
        layers took at the time of each. One of those tells as well who is slow, which is returned:
        the last step may have told only some of them.
        """
        facts = dict(sorted(commit.facts.items()))
        newest = max(facts.values(), key=lambda told: told.seated_epoch)
        told_slow = newest.slow
        times = agreed({slot: told.times for slot, told in facts.items()})
        self.seating = self.seating.as_told(newest.seating)
        for view in commit.path:
            if view.epoch > newest.seated_epoch:
                told_slow = tuple(one for one in told_slow if one.slot in view.ranks)
                slow = slowness_told(told_slow) if self.config.slow_workers == "act" else {}
                self.seating = self.seating.after(view.ranks, times, slow)
        for cuts in filter(None, (told.cuts_wanted for told in facts.values())):
            self.seating = self.seating.recut(cuts)
        if self.member.cuts_wanted == facts[self.slot].cuts_wanted:
            self.member.cuts_wanted = None
        return told_slow

    # ---- the state ----------------------------------------------------------------------------

    def bind(self, framework: Framework, *, deal: Deal, seating: Seating | None = None) -> None:
        """Take the framework's state into care: map the snapshot memory for it.

        ``deal(**seating.dealt_over)`` says who runs what; it has to be pure, and may be asked for
        another ``num_microbatches``. ``seating``: who shares which state; without one, the job is
        data-parallel. Raises ConfigurationError for groups that cannot grow where there is a
        reserve.
        """
        self.phases.fire("startup")
        self.deal = deal
        if not self.alone:
            self.remember(devices=sorted(self.groups.launched_on.items()))
        if self.reserve:
            # With stages, who is in a group follows from the seating.
            check_growing_groups(self.groups, width=None if seating else len(self.homes))
        self.seating = seating or FlatSeating(
            homes=self.homes, ranks=self.view.ranks, buckets=framework.bucket_lengths()
        )
        self.dataflow = deal(**self.seating.dealt_over)
        # Of batches with fewer micro-batches than a view is planned for.
        self._smaller: dict[int, Flow] = {}
        self._describe_layout()
        self._alignment = framework.shard_alignment
        if self.config.snapshots:
            whole = self._cut(self.seating.largest, 1).payload_bytes
            self.pool = SnapshotPool(
                self.member.snapshot_fds,
                slot=self.slot,
                capacity_bytes=capacity_of(whole + CAPSULE_ROOM_BYTES),
                needed_bytes=self.local_workers * self.snapshot_bytes,
                available_bytes=available_bytes(),
            )

    def _describe_layout(self) -> None:
        if isinstance(self.dataflow, PipelineFlow):
            assert isinstance(self.seating, GridSeating)
            stay = {
                "why_layers_stay": self.seating.why_layers_stay,
                "why_workers_stay": self.seating.why_workers_stay,
            }
            self.member.describe({**self.dataflow.layout.to_json(), **stay})

    @property
    def snapshot_bytes(self) -> int:
        """Shared memory a worker: two buffers of its shard, and as much for each copy it holds.

        What is held for a worker of the same node is that worker's own memory.
        """
        cell = self.seating.cell_of(self.slot)
        shard = 0 if cell is None else self._cut(cell.buckets, len(cell.ranks)).payload_bytes
        elsewhere = sum(not self._is_local(target) for target in self._copy_targets())
        return 2 * shard * (1 + elsewhere)

    def _copy_targets(self) -> tuple[int, ...]:
        view = self.view
        cell = self.seating.cell_of(self.slot)
        return copy_targets(
            self.slot,
            ranks=view.ranks,
            nodes=view.nodes,
            copies=self.config.snapshot_copies,
            peers=() if cell is None else cell.ranks,
        )

    def _is_local(self, slot: int) -> bool:
        node = dict(zip(self.view.ranks, self.view.nodes, strict=True))
        return node[slot] == node[self.slot]

    def _cut(self, buckets: tuple[int, ...], width: int) -> ShardCut:
        return ShardCut(buckets=buckets, width=width, alignment=self._alignment)

    def seal_initial(self, framework: Framework) -> None:
        """Seal the state before the first step, once."""
        if not self._has_sealed:
            self.seal(framework)

    def await_start(self) -> None:
        """Wait until the supervisors know that everyone has sealed, as everyone has by now.

        Until they do, a loss ends the job: it would in the first step, on a busy machine.
        """
        if self.config.snapshots:
            self.member.wait_started(self.config.transfer_timeout_s)

    def seal(self, framework: Framework) -> None:
        """Seal the state after ``completed`` steps and have other supervisors hold it.

        Those of this node are told once an epoch, those of other nodes get a copy of each step.
        """
        if self._behind is not None:
            raise AssertionError("the state was to be sealed before its optimizer state was here")
        self._unreadable.clear()
        if not self.config.snapshots:
            return
        self._seals_in_epoch += 1
        cell = self.seating.cell_of(self.slot)
        if cell is not None:
            self._seal_shard(framework, cell)
        if framework.keeps_state:
            self._live = self.completed, self.view.epoch
        if self._seals_in_epoch == 2:
            # The collective between the two has shown that the first is safe everywhere.
            self.member.release(self.view.epoch)

    def _seal_shard(self, framework: Framework, cell: Cell) -> None:
        record = self.pool.seal(
            step=self.completed,
            epoch=self.view.epoch,
            cell=cell.key,
            units=cell.units,
            ranks=cell.ranks,
            parts=framework.read_shard(),
            capsule=framework.read_capsule(),
            before_seal=lambda: self.phases.enter("snapshot"),
        )
        self._has_sealed = True
        first = self._seals_in_epoch == 1
        targets = [slot for slot in self._copy_targets() if first or not self._is_local(slot)]
        if first or targets:
            self.member.sealed(record, targets)
            self._handed_over_step = self.completed

    def await_copies(self) -> None:
        """Wait until the last own snapshot is held wherever it has to be.

        Everyone does so before the grad norm of the next step; that collective therefore proves
        that the step is sealed and copied everywhere, and the older buffer may be overwritten.
        """
        if self._seals_in_epoch and self._handed_over_step == self.completed:
            with self.member.progress_page.waiting(OUTSIDE):
                self.member.wait_copied(self.completed, timeout_s=self.config.transfer_timeout_s)

    def begin_update(self) -> None:
        """Model and optimizer are about to change: have the state whole, and its snapshot safe."""
        self.complete_state()
        self.await_copies()
        self.leave_seal()

    def leave_seal(self) -> None:
        """From here on model and optimizer are no longer what was sealed last."""
        self._live = None

    def read_behind(self, plan: RecoveryPlan, framework: Framework) -> None:
        """Have the optimizer state follow the weights, from the same snapshots.

        A snapshot is overwritten only after a grad norm of everyone that comes after the update.
        """
        self._behind = MomentsBehind(
            plan,
            slot=self.slot,
            pool=self.pool,
            timeout_s=self.config.transfer_timeout_s,
            check=self.member.check,
            write=framework.write_moments,
        )
        if not framework.moments_may_follow:
            self.complete_state()

    def complete_state(self) -> None:
        """Install the optimizer state that follows the weights, where it has not been yet.

        Everyone does so before the update, and before work that may read it. Where a snapshot
        cannot be read, the view is renewed, and the next plan avoids it. Raises EpochChanged.
        """
        if self._behind is None:
            return
        with self.member.progress_page.waiting(OUTSIDE):
            try:
                self._record.followed = self._behind.complete()
            except SnapshotUnreadableError as error:
                self._unreadable.add((error.holder, error.owner, error.step))
                self.member.severed(self.view.epoch, str(error))
                self.member.await_proposal(timeout_s=self.config.transfer_timeout_s)
        self._behind = None

    def planner(
        self, commit: Commit, *, trusts_memory: bool
    ) -> Callable[[frozenset[tuple[int, int, int]]], RecoveryPlan]:
        """The pure plan of a commit, as a function of the snapshots to avoid.

        ``trusts_memory``: what workers still have is left in place where it need not change.
        """
        unreadable = {one for told in commit.facts.values() for one in told.unreadable}
        live = {slot: told.live for slot, told in commit.facts.items()}

        def plan(rejected: frozenset[tuple[int, int, int]]) -> RecoveryPlan:
            return make_plan(
                epoch=commit.view.epoch,
                reason=commit.view.reason,
                ranks=commit.view.ranks,
                cells=self.seating.cells,
                dataflow=self.deal(**self.seating.dealt_over),
                alignment=self._alignment,
                inventory=commit.inventory,
                rejected=rejected | unreadable,
                live=live if trusts_memory else {},
            )

        return plan

    # ---- recoveries, as events ------------------------------------------------------------------

    def begin_recovery(self) -> None:
        """Start the clock of a recovery."""
        self._record.begin()
        self.stopwatch.drop_step()
        self.slow_workers.interrupt()

    def end_recovery(self, plan: RecoveryPlan, *, fetched_bytes: int) -> None:
        """Adopt the plan; the event is emitted when the redone step is committed."""
        pause_s = self._record.end(
            plan,
            left=self.dataflow,
            interrupted_step=self.completed,
            newcomers=self._newcomers,
            fetched_bytes=fetched_bytes,
        )
        self.slow_workers.note_pause(pause_s)
        self.completed = self.phases.step = plan.restore_step
        self.phases.replaying = True
        self.dataflow = plan.dataflow
        self._smaller = {}
        self._describe_layout()
        self.begin_flow(plan.dataflow)
        if self._entering:
            self._entering = False
            self.events.emit(
                "entered",
                slot=self.slot,
                incarnation=self.member.incarnation,
                epoch=plan.epoch,
                step=plan.restore_step,
                beside_s=self._ready_s - self._started_s,
                waited_s=time.time() - self._ready_s,
                fetched_bytes=fetched_bytes,
            )

    def flow_of(self, num_microbatches: int) -> Flow:
        """What the workers of this view run of a batch of so many micro-batches, alike on all.

        A view is planned for the whole batch; while its size ramps up, fewer are dealt likewise.
        """
        flow, over = self.dataflow, self.seating.dealt_over
        if not isinstance(flow, Shares) and num_microbatches == flow.num_microbatches:
            return flow
        if num_microbatches not in self._smaller:
            self._smaller[num_microbatches] = self.deal(**over, num_microbatches=num_microbatches)
        return self._smaller[num_microbatches]

    def begin_flow(self, flow: Flow) -> None:
        """From now on steps are run by ``flow``: at its clock, and paces are compared by it."""
        self.stopwatch.times.compared = self._compared_passes(flow)
        self._set_clock(flow)

    def _compared_passes(self, flow: Flow) -> int | None:
        """Forward passes in a step of whoever has the fewest of those with the same layers."""
        cell = self.seating.cell_of(self.slot)
        if cell is None or isinstance(flow, Shares):
            return None
        counts = [len(flow.microbatches(slot)) for slot in cell.ranks]
        return min(counts) * (flow.layout.vpp if isinstance(flow, PipelineFlow) else 1)

    def _set_clock(self, flow: Flow) -> None:
        """Run at the clock that the dataflow gives to this worker."""
        clocks = self.stopwatch.clocks
        clock = flow.clock(self.slot) if isinstance(flow, PipelineFlow) else 1.0
        if clock != clocks.clock:
            clocks.set(clock)
            self.events.emit("clock_set", slot=self.slot, epoch=self.view.epoch, clock=clock)

    def recovery_over(self) -> dict[str, object] | None:
        """Work was completed: the record of the recovery that led to it, if one did."""
        record = self._record.over()
        if record is not None:
            self.phases.replaying = False
        return record

    def close(self) -> None:
        """Leave the job as done."""
        self.member.finish()
        self.stopwatch.clocks.close()
        self.links.close()
