"""A trainer's side of an elastic job: joins, keeps the view, and what each worker runs in it."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable, check_growing_groups
from elaswave_plugin.config import ElasticConfig, parse_kill
from elaswave_plugin.core.agreement.hang import COMMIT
from elaswave_plugin.core.agreement.next_view import LAST_CALL
from elaswave_plugin.core.agreement.view import WorkerId
from elaswave_plugin.core.layout.reserve import built_among, grown_replicas
from elaswave_plugin.core.layout.worker_facts import SlowReport, WorkerFacts
from elaswave_plugin.core.planner.layer_times import PassTimes, agreed
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.planner.slow import slowness_of
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, Placement
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, make_plan
from elaswave_plugin.core.step.dataflow import Shares
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import Framework
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import JobConstants, StartDetached
from elaswave_plugin.ipc.progress_page import PhaseClock
from elaswave_plugin.ipc.snapshot_record import BUFFERS
from elaswave_plugin.recovery.handshake import Notes
from elaswave_plugin.recovery.phases import Phases
from elaswave_plugin.recovery.place import Deal, Place
from elaswave_plugin.recovery.record import RecoveryRecord
from elaswave_plugin.recovery.relief import Relief
from elaswave_plugin.recovery.slow_workers import SlowWorkers, asked_last
from elaswave_plugin.recovery.state_keeper import StateKeeper
from elaswave_plugin.recovery.stopwatch import Stopwatch
from elaswave_plugin.rehearsed import observer, unobserved
from elaswave_plugin.trainer.broken_links import BrokenLinks
from elaswave_plugin.trainer.member import Commit
from elaswave_plugin.version import __version__


def check_given(given: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigurationError, alike on all workers, where what some were given differs."""
    (first, wanted), *others = given.items()
    for who, found in others:
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{name} is {value!r} for {first} and {found.get(name)!r} for {who}: give every"
                    " worker of a job the same settings and the same version"
                )


# Longer than the launcher's own limit for the meeting, whose message is the better one.
JOIN_TIMEOUT_S = 3600.0


class Worker(Place):
    """One member of the job; everything of it that is not framework-specific."""

    def __init__(
        self,
        *,
        config: ElasticConfig,
        environ: Mapping[str, str],
        model_parallel: tuple[int, int] = (1, 1),
    ) -> None:
        """Join the job that the agent belongs to; blocks until the first view is committed.

        ``model_parallel``: the sizes of tp and pp, by which slots beyond the launch have places.
        In the place of a lost worker nothing is waited for: the framework is built at the sizes of
        the launch, `detached`, and `ask_to_enter` comes before the first step.
        Raises ConfigurationError when the process was not started by an agent.
        """
        super().__init__(config, environ)
        self._tp, self._pp = model_parallel
        self._environ = environ
        self.observe: Callable[..., None] = unobserved
        """Told of each step and its passes, once the framework is bound."""
        self.ledger = self._log("ledger.jsonl")
        self.steps = self._log("steps.jsonl")
        broken_links = BrokenLinks(self.member, returns=config.respawn > 0)
        self.links = LinkTable(
            self.slot,
            host=self.member.host,
            secret=self.member.secret,
            on_link_lost=lambda slot, why, silent: broken_links.report(
                slot, why, silent=silent, epoch=self.view.epoch, step=self.completed
            ),
            progress=self.member.progress_page,
        )
        self.groups = GroupTable(
            self.links, gpu_engine=config.gpu_engine, exact=config.consistency == "exact"
        )
        self.phases = self._timed_phases()
        self.last_call = False  # whether all were told to leave, by the newest commit
        self.stopwatch = Stopwatch(
            PassTimes(),
            waited=lambda: self.links.waited_s,
            is_followed=lambda: self.state.is_followed,
        )
        self.slow_workers = SlowWorkers(self)
        self.relief = Relief(self)
        self._record = RecoveryRecord(slot=self.slot, events=self.events, phases=self.phases)
        self.state = StateKeeper(
            self.member, config=config, phases=self.phases, record=self._record
        )
        self.notes = Notes(self)
        self._entering, self._ready_s = False, 0.0
        self._newcomers: tuple[str, ...] = ()
        self._came: dict[WorkerId, int] = {}
        self._restored_step = 0
        self._asked_for_interval = False
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
                start_s=config.hang_start_timeout_s,
                in_kernel_s=config.uninterruptible_timeout_s,
            ),
        )

    def _join(self) -> None:
        """Take part in the first view, or build alone from what the job remembers."""
        config = self.config
        self.member.start(self._ring)
        respawn = config.respawn if config.snapshots else 0
        given = {"elaswave_plugin": __version__, **config.of_the_job()}
        run_id = config.run_id or uuid.uuid4().hex[:8]
        launch_id = uuid.uuid4().hex[:8]
        facts = replace(self._facts(), run_id=run_id, launch_id=launch_id, given=given)
        welcome = self.member.join(facts, timeout_s=JOIN_TIMEOUT_S, respawn=respawn)
        self.launch_slots = welcome.view.ranks
        # One that came beyond the launch builds as one of the launch does.
        ranks = built_among(self.slot, self.launch_slots, tp=self._tp, pp=self._pp)
        self.view = replace(welcome.view, ranks=ranks)
        self.placement = FlatPlacement(launch_slots=self.launch_slots, ranks=self.view.ranks)
        if isinstance(welcome, StartDetached):
            check_given({"the job": welcome.job_constants["given"], "the worker that joins": given})
            self.detached = self.links.detached = True
            self.job_constants = welcome.job_constants
            self.run_id = self.job_constants["run_id"]
            self.launch_id = self.job_constants["launch_id"]
            self.groups.launched_on = dict(self.job_constants["devices"])
        else:
            self.detached = False
            facts_of = sorted(welcome.facts.items())
            check_given({f"worker {slot}": told.given for slot, told in facts_of})
            self._open_links(welcome)
            # One run id over the whole job: the one that the first owner of rank 0 proposed.
            first = welcome.facts[self.launch_slots[0]]
            self.run_id, self.launch_id = first.run_id, first.launch_id
            self.remember(run_id=self.run_id, launch_id=self.launch_id, given=given)

    # ---- the view -----------------------------------------------------------------------------

    def _ring(self, epoch: int, reason: str) -> None:
        """Doorbell: runs in the member's thread the moment a view is proposed."""
        self.links.interrupt(epoch, reason)

    def _facts(self) -> WorkerFacts:
        return WorkerFacts(
            address=self.links.address,
            communicators=self.groups.device_facts(),
            step=self.completed,
            unreadable=tuple(self.state.unreadable),
            told_to_leave=self.member.told_to_leave,
        )

    def _told(self) -> WorkerFacts:
        """The facts of a worker that has a view: also where it is, and how fast."""
        return replace(
            self._facts(),
            placed_epoch=self.view.epoch,
            placement=self.placement.state(),
            times=self.stopwatch.times.told(),
            slow=self.slow_workers.reports(),
            slow_views=self.slow_workers.views,
            seal_interval=self.state.wanted_interval,
            cuts_wanted=self.member.cuts_wanted,
            out_of_memory=self.relief.told,
            live=self.state.live,
        )

    @property
    def spare_width(self) -> int:
        """So many replicas may every stage have beyond those of the launch."""
        return grown_replicas(self.reserve, tp=self._tp, pp=self._pp)

    def groups_at_launch(self) -> dict[str, tuple[int, ...]]:
        """Return the groups before a change, by the slots of the launch that workers stand for."""
        home = dict(zip(self.view.ranks, self.launch_slots, strict=True))
        groups = self.groups.members()
        return {name: tuple(home[slot] for slot in slots) for name, slots in groups.items()}

    @property
    def untried(self) -> tuple[str, ...]:
        """Those that came with the last change, before they have made a step with the others."""
        return self._newcomers if self.completed == self._restored_step else ()

    @property
    def has_newcomers(self) -> bool:
        """True if a worker of the view has come after the launch."""
        return any(self._came_in(one) for one in self.view.workers)

    @property
    def is_latest(self) -> bool:
        """True if this worker has come after the launch, and none of the view later."""
        last = max(self._came_in(one) for one in self.view.workers)
        return 0 < last == self._came_in(self.member.worker)

    def _came_in(self, worker: WorkerId) -> int:
        """The number of the view in which a worker came; 0 for one of the launch.

        Of those that were there when this one came, all that counts is that they came before.
        """
        return self._came.get(worker, 0)

    def remember(self, **what: Unpack[JobConstants]) -> None:
        """Keep what the job fixed at its start, for a worker that replaces this one."""
        self.job_constants |= what
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
        self.state.drop_deferred()
        with self.member.progress_page.waiting(COMMIT):
            return self.member.quiesce(self._told())

    def install_view(self, commit: Commit) -> None:
        """Edit every group in place to the committed view and start its epoch."""
        self._open_links(commit)
        told_slow = self._follow_views(commit)
        before = commit.path[-2] if len(commit.path) > 1 else self.view
        came = {self.member.worker} if self.detached else commit.view.workers - before.workers
        self._came.update(dict.fromkeys(came, commit.view.epoch))
        self._newcomers = tuple(sorted(map(str, commit.view.workers - before.workers)))
        self.detached = False
        # A failure meanwhile finds some of them a step further on: only that view finds all alike.
        all_told = all(told.told_to_leave for told in commit.facts.values())
        self.last_call = commit.view.reason == LAST_CALL or (self.last_call and all_told)
        self.view = commit.view
        self.slow_workers.learn(told_slow, asked_last(commit.facts.values()))
        self.notes.find(commit.inventory)
        wanted = max(told.seal_interval for told in commit.facts.values())
        self.state.interval = self.config.fixed_interval or wanted
        self._asked_for_interval = False
        self.state.begin_epoch(self.view, self.placement)
        edits = self.placement.edits(self.groups.launched(), self.slot)
        self.groups.edit_groups(self.ranks, edits)
        self.groups.settle({slot: told.communicators for slot, told in commit.facts.items()})

    def _follow_views(self, commit: Commit) -> tuple[SlowReport, ...]:
        """Apply the views that none has applied yet to the placement that has most of them applied.

        A worker that was not there cannot tell the placement from the views: it also depends on
        what layers took at the time of each. Returned are the slow workers
        that it names: the last step may have told only some of the workers.
        """
        facts = dict(sorted(commit.facts.items()))
        newest = max(facts.values(), key=lambda told: told.placed_epoch)
        told_slow, asked = newest.slow, asked_last(facts.values())
        # Where it did not pay, they stay named.
        relieves = self.config.slow_workers == "act" and not (asked and asked.takes_back)
        times = agreed({slot: told.times for slot, told in facts.items()})
        self.placement = self.placement.with_state(newest.placement)
        self.placement = self.placement.within(self.relief.learn(facts, commit.view.ranks))
        for view in commit.path:
            if view.epoch > newest.placed_epoch:
                told_slow = tuple(one for one in told_slow if one.slot in view.ranks)
                slow = slowness_of(told_slow) if relieves else {}
                self.placement = self.placement.after(view.ranks, times, slow)
        for cuts in filter(None, (told.cuts_wanted for told in facts.values())):
            self.placement = self.placement.recut(cuts)
        if self.member.cuts_wanted == facts[self.slot].cuts_wanted:
            self.member.cuts_wanted = None
        return told_slow

    # ---- the state ----------------------------------------------------------------------------

    def bind(
        self,
        framework: Framework,
        *,
        deal: Deal,
        placement: Placement | None = None,
        whole: bool = False,
    ) -> None:
        """Take the framework's state into care: map the snapshot memory for it.

        ``deal(**placement.dealt_over)`` deals the work; it has to be pure, and may be asked for
        another ``num_microbatches``. ``placement``: the sharing of state; without one, the job is
        data-parallel, and a worker runs ``whole`` replicas, or any micro-batches of theirs. Raises
        ConfigurationError for groups that cannot grow where there is a reserve.
        """
        self.phases.fire("startup")
        self.deal = deal
        if not self.detached:
            self.remember(devices=sorted(self.groups.launched_on.items()))
        if self.reserve:
            # With stages, who is in a group follows from the placement.
            check_growing_groups(self.groups, width=None if placement else len(self.launch_slots))
        self.placement = placement or FlatPlacement(
            launch_slots=self.launch_slots,
            ranks=self.view.ranks,
            buckets=framework.bucket_lengths(),
            whole=whole,
        )
        self.dataflow = deal(**self.placement.dealt_over)
        self._describe_layout()
        self.state.open(self.view, self.placement, alignment=framework.shard_alignment)
        self.observe = observer(self._environ, self, framework)

    def _describe_layout(self) -> None:
        layout = self.placement.described()
        if layout is not None:
            self.member.describe(layout)

    def planner(self, commit: Commit) -> Callable[..., RecoveryPlan]:
        """Return `make_plan` for a commit, except for the snapshots to avoid.

        The work is dealt here, once, however many snapshots turn out to be damaged.
        """
        unreadable = {one for told in commit.facts.values() for one in told.unreadable}
        last = self.notes.last_step(commit.facts)
        return partial(
            make_plan,
            epoch=commit.view.epoch,
            reason=commit.view.reason,
            ranks=self.ranks,
            shard_groups=self.placement.shard_groups,
            dataflow=self.relief.deal(),
            alignment=self.state.alignment,
            inventory=[
                one
                for one in commit.inventory
                if one.buffer < BUFFERS and one.step <= last and one not in unreadable
            ],
            live={slot: told.live for slot, told in commit.facts.items()},
        )

    # ---- recoveries, as events ------------------------------------------------------------------

    def begin_recovery(self) -> None:
        """Start the clock of a recovery."""
        self._record.begin(ranks=self.ranks)
        self.stopwatch.drop_step()
        self.slow_workers.interrupt()

    def end_recovery(self, plan: RecoveryPlan, *, fetched_bytes: int) -> None:
        """Adopt the plan; the event is emitted when the redone step is committed."""
        pause_s = self._record.end(
            plan,
            left=None if self._entering else self.dataflow,
            interrupted_step=self.completed,
            newcomers=self._newcomers,
            fetched_bytes=fetched_bytes,
        )
        self.slow_workers.note_pause(pause_s)
        self.adopt(plan)
        self.phases.step = self._restored_step = plan.restore_step
        self.state.went_back(plan.restore_step, plan.restore_buffer)
        self.phases.replaying = True
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

    def begin_flow(self, flow: Flow) -> None:
        """From now on steps are run by ``flow``: at its clock, and paces are compared by it."""
        self.stopwatch.times.compared = self._compared_passes(flow)
        self._set_clock(flow)

    def _compared_passes(self, flow: Flow) -> int | None:
        """Return the fewest forward passes in a step of a worker with the same layers."""
        shard_group = self.placement.shard_group_of(self.slot)
        if shard_group is None or isinstance(flow, Shares):
            return None
        counts = [len(flow.microbatches(slot)) for slot in shard_group.ranks]
        return min(counts) * (flow.layout.vpp if isinstance(flow, PipelineFlow) else 1)

    def _set_clock(self, flow: Flow) -> None:
        """Run at the clock that the dataflow gives to this worker."""
        clocks = self.stopwatch.clocks
        clock = flow.clock(self.slot) if isinstance(flow, PipelineFlow) else 1.0
        if clock != clocks.clock:
            clocks.set(clock)
            self.events.emit("clock_set", slot=self.slot, epoch=self.view.epoch, clock=clock)

    def ask_for_interval(self) -> None:
        """Ask, once a view, for one with fewer seals where steps wait too long for them."""
        wanted = self.state.wanted_interval
        if self.owns_rank_0 and wanted > self.state.interval and not self._asked_for_interval:
            self._asked_for_interval = True
            self.member.replan(f"steps wait for snapshots: one after every {wanted} from now on")

    def keep_work(self, seconds: float) -> None:
        """The redo of a step goes on from what took so long."""
        self._record.kept_s = seconds

    def recovery_over(self) -> dict[str, object] | None:
        """Work was completed: the record of the recovery that led to it, if one did."""
        record = self._record.over()
        if record is not None:
            self.phases.replaying = False
        return record

    def close(self) -> None:
        """Leave the job as done."""
        self.observe("closed")
        self.state.finish_seal()
        self.member.finish(self.completed)
        logs = (self.events, self.ledger, self.steps)
        missing = [what for what in (log.what_is_missing for log in logs) if what]
        if missing:
            say(f"worker {self.slot} has not written {', '.join(missing)}")
        self.stopwatch.clocks.close()
        self.links.close()
