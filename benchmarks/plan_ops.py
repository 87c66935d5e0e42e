"""The op lists of a plan, of all workers or of one: what `plan.py` times."""

from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.joint import JointPlan, plan_replicas
from elaswave_plugin.core.planner.prediction import Predictor, StepWork
from elaswave_plugin.core.step.schedule import OpLists, WorkerOps, interleaved_ops, window_ops


def op_lists(plan: JointPlan, costs: CostModel, work: StepWork) -> OpLists:
    """The lists of all workers, [stage][replica in the order of the layout]."""
    predictor = Predictor(costs, work, vpp=plan.layout.vpp)
    chosen, replicas, speeds = plan.chosen, plan_replicas(plan), plan.speeds
    if plan.split_backward:
        return predictor.split_backward(
            chosen.choice, replicas, chosen.cuts, extra=chosen.extra, speeds=speeds
        )[1]
    return predictor.lists(
        chosen.choice,
        replicas,
        chosen.cuts,
        extra=chosen.extra,
        speeds=speeds,
        slowness=plan.slowness,
    )


def worker_ops(
    plan: JointPlan, costs: CostModel, work: StepWork, *, stage: int, replica: int
) -> WorkerOps:
    """The list of replica number ``replica`` (by order) of ``stage``, alone where that is enough.

    By the window rule a list follows from its own stage's dataflow; a greedy order, or weight
    gradients in bubbles, follow from the simulation of all workers.
    """
    chosen = plan.chosen
    if plan.split_backward or (chosen.is_greedy and plan.layout.vpp == 1):
        return op_lists(plan, costs, work)[stage][replica]
    replicas = plan_replicas(plan)
    alone = chosen.choice.split((replicas[stage],), work, plan.slowness[stage : stage + 1])
    pieces = alone.pieces(0, replica)
    if plan.layout.vpp > 1:
        return interleaved_ops(
            pieces, stage=stage, num_stages=len(replicas), num_chunks=plan.layout.vpp
        )
    return window_ops(pieces, window=chosen.windows[stage])
