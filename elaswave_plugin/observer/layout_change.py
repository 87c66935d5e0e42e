"""A hybrid run's change of layout, from the events that it left, beside a simulation of its steps.

The simulation runs the op lists that the workers ran (``core/step/simulate.py``). Its costs are
what they measured of their layers by then; where it was too early for that, every layer is alike
and a backward takes twice a forward. The optimizer is not apart: the predicted step is to the
healthy ones as their simulations are. What the plan itself predicted, which has it apart, stands
beside it. Where workers outnumber processors, a step cannot be shorter than all of their work
shared out over these.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.core.step.schedule import Piece
from elaswave_plugin.errors import ElasWaveError

Record = dict[str, Any]


def layout_fields(
    *,
    attached: Sequence[Record],
    recovered: Sequence[Record],
    nodes: Mapping[int, int],
    step_s: Mapping[str, float | None],
) -> Record:
    """Return what summary.json says of the first and last layout; nothing for data-parallel runs.

    ``attached``, ``recovered``: these events; ``nodes``: by slot; ``step_s``: median step "before"
    and "after". A change is told by the first worker that reports it (`differing_reports`).
    """
    by_epoch: dict[int, Record] = {}
    for event in recovered:
        if "layout_after" in event:
            by_epoch.setdefault(event["epoch"], event)
    changes = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    known = [event for event in recovered if "layout_before" in event]
    if not known or not attached:
        return {}
    sizes = attached[0]
    before = ParallelLayout.from_json(min(known, key=itemgetter("epoch"))["layout_before"])
    measured = changes[-1].get("layer_times_s")
    times = LayerTimes() if measured is None else LayerTimes.from_json(measured)
    flow = _flow(changes[-1], sizes["num_microbatches"], sizes["micro_batch_size"], times)
    after = flow.layout
    return {
        "layout_before": before.to_json(),
        "layout_after": after.to_json(),
        "plan": {
            "dataflow": flow.policy,
            "layers_per_stage": [
                [list(span) for span in after.layers(stage)] for stage in range(len(after.stages))
            ],
            "windows": list(flow.windows),
            "clocks": list(flow.clocks),
            "greedy_order": flow.is_greedy,
            "split_backward": flow.is_split,
            **_work(flow),
            "bytes_to_move": sum(change["bytes_moved"] for change in changes),
            **_prediction(
                flow_of(
                    layout=before,
                    num_microbatches=flow.num_microbatches,
                    micro_batch_size=flow.micro_batch_size,
                ),
                flow,
                processors=_processors(recovered, nodes),
                step_s=step_s,
                times=times,
            ),
            **_planned(changes[-1], step_s["after"]),
        },
        "measured_step_s": step_s["after"],
    }


def layout_lines(layout: ParallelLayout) -> tuple[str, str]:
    """A layout in two lines: its sizes and widths, and the workers' places."""
    title, *places = str(layout).splitlines()
    return title, "; ".join(places)


def simulated_units(
    flow: PipelineFlow, *, processors: int, times: LayerTimes | None = None
) -> float:
    """A step in the units of ``times``: by default one layer's forward of one sample."""
    layout = flow.layout
    step = flow.simulated(times or LayerTimes(), dict(flow.slow))
    if step.blocked:
        raise ElasWaveError(f"the op lists of {layout} do not run: {step}")
    return max(step.seconds, layout.tp * sum(map(sum, step.busy)) / processors)


def _flow(
    change: Record, num_microbatches: int, micro_batch_size: int, times: LayerTimes
) -> PipelineFlow:
    """Return the flow that the workers ran after the change."""
    pieces = tuple(
        tuple(tuple(Piece(*piece) for piece in of_group) for of_group in of_stage)
        for of_stage in change["pieces"]
    )
    flow = PipelineFlow(
        layout=ParallelLayout.from_json(change["layout_after"]),
        num_microbatches=num_microbatches,
        micro_batch_size=micro_batch_size,
        policy=change["dataflow"],
        pieces=pieces,
        windows=tuple(change["windows"]),
        clocks=tuple(change.get("clocks") or ()),
        slow=tuple((slot, factor) for slot, factor in change.get("slow") or ()),
        times=times,
    )
    flow = flow.in_greedy_order() if change.get("greedy_order") else flow
    return flow.with_split_backward() if change.get("split_backward") else flow


def _work(flow: PipelineFlow) -> Record:
    """Micro-batches, of resized pieces the first one of each, and samples by worker."""
    workers = flow.layout.workers
    return {
        "microbatches_per_worker": {str(slot): list(flow.microbatches(slot)) for slot in workers},
        "samples_per_worker": {
            str(slot): sum(piece.stop - piece.start for piece in flow.samples(slot))
            for slot in workers
        },
    }


def _prediction(
    before: PipelineFlow,
    after: PipelineFlow,
    *,
    processors: int,
    step_s: Mapping[str, float | None],
    times: LayerTimes,
) -> Record:
    """The simulated step after the change, as long as the healthy steps were to their simulation.

    No seconds where no healthy step was counted, no error where none was after the change.
    """
    units = [simulated_units(one, processors=processors, times=times) for one in (before, after)]
    ratio, healthy_s, after_s = units[1] / units[0], step_s["before"], step_s["after"]
    predicted_s = None if healthy_s is None else healthy_s * ratio
    return {
        "simulated": True,
        "processors": processors,
        "layer_times": times.to_json(),
        "layer_times_measured": times.is_measured,
        "predicted_step_ratio": ratio,
        "predicted_step_s": predicted_s,
        "prediction_error": predicted_s / after_s - 1 if predicted_s and after_s else None,
    }


def _planned(recovered: Record, after_s: float | None) -> Record:
    """Return what the plan itself predicted, from the costs that the job had measured, if any."""
    planned_s = recovered.get("predicted_step_s")
    error = planned_s / after_s - 1 if planned_s and after_s else None
    return {"planned_step_s": planned_s, "planned_step_error": error}


def _processors(recovered: Sequence[Record], nodes: Mapping[int, int]) -> int:
    """Processors of all nodes together, as their workers count them."""
    by_node = {nodes[event["slot"]]: int(event["processors"]) for event in recovered}
    return sum(by_node.values())
