"""A worker's place in its job: the view, its part of the model and of the work, its last step."""

from collections.abc import Callable, Mapping

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.agreement.hang import OUTSIDE
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.planner.pipeline_flow import Flow
from elaswave_plugin.core.recovery_plan.placement import Placement
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.core.step.dataflow import Shares
from elaswave_plugin.ipc.environment import read_reserve
from elaswave_plugin.ipc.frames import JobConstants
from elaswave_plugin.recovery.state_keeper import StateKeeper
from elaswave_plugin.recovery.stopwatch import Stopwatch
from elaswave_plugin.snapshot.restore import read_capsule
from elaswave_plugin.tracking.events import EventLog
from elaswave_plugin.trainer.member import Member

# Deals the work of a step; takes what the placement says that it is dealt over.
Deal = Callable[..., Flow]


class Place:
    """The part of a `Worker` that its parts look at, and that each view changes.

    ``completed``: steps; ``launch_slots``: the slots of the launch, which may have ``reserve`` more
    workers; ``detached``: in no view yet; ``plan``: of the last recovery.
    """

    view: MembershipView
    placement: Placement
    dataflow: Flow
    deal: Deal
    plan: RecoveryPlan
    launch_slots: tuple[int, ...]
    state: StateKeeper
    stopwatch: Stopwatch
    detached: bool

    def __init__(self, config: ElasticConfig, environ: Mapping[str, str]) -> None:
        """Have no view yet; raises ConfigurationError where no agent has started the process."""
        self.config = config
        self.member = Member.from_environment(environ)
        self.slot = self.member.slot
        self.reserve = read_reserve(environ)
        """So many workers may join beyond those of the launch."""
        self.events = self._log("events.jsonl")
        self.completed = 0
        # What a replacement cannot learn from the others, since it builds alone.
        self.job_constants: JobConstants = {}
        # Of batches with fewer micro-batches than a view is planned for.
        self._smaller: dict[int, Flow] = {}

    def _log(self, name: str) -> EventLog:
        """A file of the run directory, which may have gone bad since the launch."""
        path = self.config.dir / name if self.config.dir else None
        return EventLog(path, late=self.member.incarnation > 0)

    @property
    def most(self) -> int:
        """The most workers that the job may have."""
        return len(self.launch_slots) + self.reserve

    @property
    def owns_rank_0(self) -> bool:
        """True if the duties of rank 0 are this worker's now."""
        return self.ranks[0] == self.slot and not self.detached

    @property
    def ranks(self) -> tuple[int, ...]:
        """The slots of the view by their rank in WORLD."""
        return self.placement.world(self.view.ranks)

    @property
    def promises_bits(self) -> bool:
        """True if the job is exact: asked for, and not shown otherwise by its first step."""
        return self.config.consistency == "exact" and not self.job_constants.get("inexact", False)

    def adopt(self, plan: RecoveryPlan) -> None:
        """Have what a recovery has agreed on."""
        self.plan, self.dataflow, self.completed = plan, plan.dataflow, plan.restore_step
        self._smaller = {}

    def flow_of(self, num_microbatches: int) -> Flow:
        """Return the flow of a batch of ``num_microbatches`` in this view, alike on all workers.

        A view is planned for the whole batch; while its size ramps up, fewer are dealt likewise.
        """
        flow, over = self.dataflow, self.placement.dealt_over
        if not isinstance(flow, Shares) and num_microbatches == flow.num_microbatches:
            return flow
        if num_microbatches not in self._smaller:
            self._smaller[num_microbatches] = self.deal(**over, num_microbatches=num_microbatches)
        return self._smaller[num_microbatches]

    def read_capsule(self, source: SealedShard) -> bytes:
        """Read and verify the capsule of a sealed shard, in the view of the last recovery."""
        with self.member.progress_page.waiting(OUTSIDE):
            return read_capsule(source, self.plan, self.state.access)
