"""Why a plan was chosen, as sentences: what each axis gives, and which limits were met.

The candidates were compared all together; the order dataflow, layers, workers, clocks is only that
of the explanation.
"""

from collections.abc import Iterable, Mapping, Sequence

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner.candidate import Candidate
from elaswave_plugin.core.planner.dvfs import ClockChoice
from elaswave_plugin.core.planner.layer_partition import layers_can_help
from elaswave_plugin.core.planner.microbatch_split import REROUTE
from elaswave_plugin.core.step.schedule import window_sizes


def concentration(layout: ParallelLayout) -> tuple[float, float]:
    """(live share, rho): live of launch replicas, and mean width over the narrowest one.

    rho bounds what any plan can gain over rerouting once bubbles vanish.
    """
    widths = layout.widths
    mean = sum(widths) / len(widths)
    return mean / layout.dp, mean / min(widths)


def loss_reason(layout: ParallelLayout) -> str:
    """Describe what is left of the launch layout, or what it has become."""
    live, rho = concentration(layout)
    count, total = sum(layout.widths), layout.dp * len(layout.stages)
    of = f"{count} of {total} replicas are live"
    present = of if count <= total else f"{count} replicas are live, {total} at launch"
    return f"{present} ({live:.3f}), mean over narrowest stage rho = {rho:.2f}"


def slow_reason(slow: Mapping[int, float]) -> str | None:
    """Name the slow workers, by slot, and how many times as long each takes."""
    if not slow:
        return None
    return "slow: " + ", ".join(f"w{slot} takes {slow[slot]:g}x as long" for slot in sorted(slow))


def dataflow_reason(candidates: Sequence[Candidate], *, now: tuple[int, ...]) -> str:
    """Describe what dealing again gives where nothing moves."""
    stay = [one for one in candidates if not one.moves and one.cuts == now]
    if not stay:
        return "dataflow: nothing fits into memory where layers and workers stay"
    best = _fastest(stay)
    routed = [one for one in stay if one.choice.policy == REROUTE]
    against = f", rerouting {_fastest(routed).seconds:.4g} s" if routed else ""
    return f"dataflow: {best.choice}, {best.order}, takes {best.seconds:.4g} s{against}"


def layers_reason(
    candidates: Sequence[Candidate], layout: ParallelLayout, *, now: tuple[int, ...]
) -> str:
    """Describe what moving layers gives where workers stay, or why it gives nothing."""
    others = [one for one in candidates if not one.moves and one.cuts != now]
    stay = [one for one in candidates if not one.moves and one.cuts == now]
    if layout.vpp > 1:
        return "layers: stay, since those of an interleaved pipeline are not moved"
    best_s = _fastest(others).seconds if others else float("inf")
    if others and (not stay or best_s < _fastest(stay).seconds):
        cuts = " ".join(map(str, _fastest(others).cuts))
        return f"layers: cuts {cuts} take {best_s:.4g} s"
    for stage, width in enumerate(layout.widths):
        (start, stop), lost = layout.layers(stage)[0], layout.dp - width
        if lost > 0 and not layers_can_help(layers=stop - start, launch_width=layout.dp, lost=lost):
            return (
                f"layers: stay; one less evens the load only if the {stop - start} of stage {stage}"
                f" are more than (live {width}) / (lost {lost}) = {width / lost:.3g}"
            )
    return "layers: stay; other cuts are no faster" if stay else "layers: no cuts fit"


def workers_reason(candidates: Sequence[Candidate]) -> str | None:
    """Describe the fastest plan in which workers change stage; None where there is none."""
    moved = [one for one in candidates if one.moves]
    if not moved:
        return None
    best = _fastest(moved)
    return f"workers: {len(best.moves)} that change stage take {best.seconds:.4g} s"


def payback_reason(chosen: Candidate, *, stays: bool, horizon_s: float) -> str:
    """Describe what is done, and whether moving pays over the horizon."""
    what = f"{chosen.choice}, {chosen.order}"
    if stays:
        return f"chosen: {what}, nothing moves; no move pays within {horizon_s:g} s"
    return (
        f"chosen: {what}, moves {chosen.moved_bytes / 2**20:.4g} MiB with a pause of"
        f" {chosen.pause_s:.3g} s and {chosen.follow_s:.3g} s behind compute; gains"
        f" {chosen.benefit_s:.4g} of the next {horizon_s:g} s"
    )


def windows_reason(chosen: Candidate) -> str | None:
    """Slots in flight, where memory made them fewer than wanted."""
    if chosen.extra is None or not chosen.windows:
        return None
    if chosen.windows == window_sizes(len(chosen.windows), extra=chosen.extra):
        return None
    return f"memory: slots in flight are {' '.join(map(str, chosen.windows))} by stage"


def result_reason(layout: ParallelLayout, *, seconds: float, healthy_s: float) -> str:
    """The predicted step against the launch layout's."""
    live, _ = concentration(layout)
    return (
        f"predicted step {seconds:.4g} s, {healthy_s:.4g} s at launch: {healthy_s / seconds:.3f} of"
        f" its throughput, {healthy_s / seconds / live:.3f} of the live share"
    )


def clocks_reason(clocks: ClockChoice) -> str:
    """Describe the clocks, and the seconds of a step that they give."""
    return (
        f"clocks: {' '.join(f'{clock:g}' for clock in clocks.clocks)} give {clocks.seconds:.4g} s"
    )


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.seconds)
