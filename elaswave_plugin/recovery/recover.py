"""The main path: one function, one call a phase, from an interrupted step to its replay."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from elaswave_plugin.core.agreement.hang import OUTSIDE
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.errors import (
    EpochChanged,
    LinkError,
    MismatchError,
    PeerError,
    WeightsDifferError,
)
from elaswave_plugin.framework import Framework
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.snapshot.restore import RestoredState, restore

Result = TypeVar("Result")


def guarded(
    work: Callable[[], Result],
    recover: Callable[[], object],
    *,
    blame: Callable[[LinkError], object] | None = None,
) -> Result:
    """Run ``work``, and again after ``recover()``, until nothing interrupts it.

    ``blame(error)`` is told where members of a group do not do the same; it returns where some of
    them leave for that, which others are to recover from. Without it, that is raised.
    """
    while True:
        try:
            return work()
        except EpochChanged:
            pass
        except (MismatchError, PeerError) as error:
            if blame is None:
                raise
            blame(error)
        # Outside of the handler: its traceback would keep a step's autograd graph alive.
        recover()


def recover(worker: Worker, framework: Framework) -> None:
    """Bring this worker to the start of the step that all survivors redo together.

    The optimizer state follows while that step computes; `StateKeeper.complete` waits for it.
    A proposal that arrives at any point supersedes the attempt and starts it again: until the new
    layout is sealed, nothing that an attempt reads from is overwritten.
    Raises SnapshotGapError, PlanDigestError, WeightsDifferError, TooLittleMemoryError, JobStopped.
    """
    worker.phases.fire("detect")
    worker.begin_recovery()
    guarded(partial(worker.relief.recovery, partial(_attempt, worker, framework)), lambda: None)


def _attempt(worker: Worker, framework: Framework) -> None:
    phases = worker.phases
    with phases.timed("agree"):
        framework.pause()
        worker.state.finish_seal()
        commit = worker.quiesce()
    with phases.timed("edit"):
        worker.install_view(commit)
        plan_of = worker.planner(commit)
    state = take_state(worker, framework, plan_of)
    worker.state.read_deferred(state.plan, framework)
    worker.end_recovery(state.plan, fetched_bytes=state.fetched_bytes)


def take_state(
    worker: Worker, framework: Framework, plan_of: Callable[..., RecoveryPlan]
) -> RestoredState:
    """Have the weights of the new layout, alike on every replica.

    What is in place is left alone at first; where replicas differ then, all of it is read again.
    """
    phases = worker.phases
    for make_plan in (plan_of, partial(plan_of, live={})):
        with phases.timed("move"):
            state = restore(
                worker.state.access,
                make_plan=make_plan,
                # Who reads waits for agents: the others, who wait for it, are to be patient.
                reading=partial(worker.member.progress_page.waiting, OUTSIDE),
            )
        with phases.timed("rebind"):
            worker.state.leave_seal()
            framework.rebind(state.plan)
            framework.write_weights(state.masters)
            framework.write_capsule(state.capsule)
        with phases.timed("verify"):
            differing = compare_weights(framework, state.plan)
        if differing is None:
            return state
    raise WeightsDifferError(
        f"replicas hold different weights after the recovery of view {state.plan.epoch}, although"
        f" all were read again: {differing}; start from the last checkpoint, and test the memory of"
        " these workers' nodes"
    )


def compare_weights(framework: Framework, plan: RecoveryPlan) -> str | None:
    """Gather the weights; return the shard group whose replicas differ, None where all agree."""
    mine = torch.tensor([framework.sync_weights()], dtype=torch.int64)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for shard_group in plan.shard_groups:
        digests = {slot: int(everyone[plan.ranks.index(slot)]) for slot in shard_group.ranks}
        if len(set(digests.values())) != 1:
            return f"{shard_group} has digests {digests}"
    return None
