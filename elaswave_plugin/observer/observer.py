"""The outside reader: judges a run by the files that it left, and by a reference run's."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from elaswave_plugin.config import RECOVERY_PHASES, Kill
from elaswave_plugin.core.agreement.view import departed
from elaswave_plugin.core.step.audit import batch_sizes, counting_views, lost_and_repeated
from elaswave_plugin.errors import EXIT_TOLD
from elaswave_plugin.observer.layout_change import layout_fields
from elaswave_plugin.observer.run import (
    Record,
    RunFiles,
    counted_steps,
    first_step_done_s,
    first_steps,
)
from elaswave_plugin.tracking.state_dump import differing_names, dumped_steps, hash_state

# What follows from the plan alone. The layout before is not among it: a worker that comes back has
# none, and one whose recovery was interrupted by the next one tells of that before both.
_OF_THE_PLAN = (
    *("layout_after", "dataflow", "pieces", "windows", "clocks", "slow", "greedy_order"),
    *("split_backward", "layer_times_s", "bytes_moved", "restored_step"),
)


def differing_reports(recovered: Iterable[Record]) -> list[str]:
    """Return one sentence for each field of a plan that two workers of a view report differently.

    ``recovered``: the events of this kind. What is judged by such a field goes by the first report.
    """
    firsts: dict[int, Record] = {}
    found: dict[tuple[int, str], str] = {}
    for event in recovered:
        first = firsts.setdefault(event["epoch"], event)
        for field in _OF_THE_PLAN:
            if event.get(field) != first.get(field):
                slots = f"workers {first['slot']} and {event['slot']}"
                sentence = f"{slots} report different {field} of view {event['epoch']}"
                found.setdefault((event["epoch"], field), sentence)
    return list(found.values())


def joins_of(run: RunFiles) -> list[Record]:
    """Return one record a worker that came back.

    `beside_s`: from its start until it was built; `stall_s`: the longest stand-still of a worker
    that let it in; `time_to_full_s`: from the end of the last one that worked on its slot until
    all workers had completed a step with it; `bytes`: of state that it fetched.
    """
    worked = {record["pid"] for record in run.steps}
    recovered, exited = run.of_kind("recovered"), run.of_kind("worker_exited")
    joins = []
    for event in run.of_kind("entered"):
        slot, epoch = event["slot"], event["epoch"]
        ends = [e["time_s"] for e in exited if e["slot"] == slot and e["pid"] in worked]
        empty_since_s = max((end for end in ends if end < event["time_s"]), default=None)
        stalls = [e["pause_s"] for e in recovered if e["epoch"] == epoch and e["slot"] != slot]
        own = [e for e in recovered if (e["epoch"], e["slot"]) == (epoch, slot)]
        full_s = first_step_done_s(run, epoch)
        joins.append(
            {
                "epoch": epoch,
                "slot": slot,
                "incarnation": event["incarnation"],
                "step": event["step"],
                "beside_s": event["beside_s"],
                "stall_s": max(stalls, default=None),
                "time_to_full_s": (
                    None if full_s is None or empty_since_s is None else full_s - empty_since_s
                ),
                # The optimizer state follows, behind the first step.
                "bytes": (own or [event])[-1]["fetched_bytes"],
            }
        )
    return joins


LOST, LEFT, CAME = "lost", "left", "came"


def changes_of(run: RunFiles) -> list[Record]:
    """Return one record a worker that was lost, left as it was told to, or came, in order.

    `step`: the first one of the view, or of the next view that completed one; None where no step
    followed.
    """
    views = {event["epoch"]: event for event in run.of_kind("view_committed")}
    arrivals = {(event["epoch"], event["slot"]) for event in run.of_kind("entered")}
    firsts = first_steps(run)
    found = []
    for before, after in pairwise(sorted(views)):
        step = next((firsts[view] for view in sorted(firsts) if view >= after), None)
        was, now, reason = views[before]["ranks"], views[after]["ranks"], views[after]["reason"]
        came = {slot for slot in now if slot not in was or (after, slot) in arrivals}
        changes = [
            (LEFT if departed(reason, slot) else LOST, slot)
            for slot in sorted(was)
            if slot not in now or slot in came
        ]
        changes += [(CAME, slot) for slot in sorted(came)]
        for what, slot in changes:
            record = {"view": after, "step": step, "slot": slot, "what": what, "reason": reason}
            found.append({**record, "workers": len(now)})
    return found


# The reason of the view that nothing led to.
LAUNCH = "launch"
_LAYOUTS = ("layout_before", "layout_after")


def losses_of(run: RunFiles) -> dict[int, float]:
    """Return the loss of each step, exact to the bit."""
    return {step: _loss(records[0]) for step, records in counted_steps(run).items()}


def disagreeing_steps(run: RunFiles) -> list[int]:
    """Return the steps of which two workers report different losses or grad norms."""
    return [
        step
        for step, records in counted_steps(run).items()
        if len({(_loss(record).hex(), _norm(record)) for record in records}) > 1
    ]


def audit_samples(run: RunFiles, *, batches: Sequence[int]) -> tuple[int, int]:
    """Return (samples lost, samples repeated) over all steps; ``batches``: the size of each."""
    return lost_and_repeated(counting_views(run.steps), run.ledger, batches=batches)


def kills_of(run: RunFiles, wanted: Iterable[Kill] | None = None) -> list[Record]:
    """Return each wanted kill (all that fired, if none are named) and whether it fired.

    Fired means that the worker said so and that its agent saw that very process end.
    """
    exits = {(event["slot"], event["pid"]) for event in run.of_kind("worker_exited")}
    fired = {
        (event["slot"], event["step"], event["phase"])
        for event in run.of_kind("fault_fired")
        if (event["slot"], event["pid"]) in exits
    }
    asked = sorted(fired) if wanted is None else [(k.slot, k.step, k.phase) for k in wanted]
    return [
        {"slot": slot, "step": step, "phase": phase, "fired": (slot, step, phase) in fired}
        for slot, step, phase in asked
    ]


def recoveries_of(run: RunFiles) -> list[Record]:
    """Return one record a completed recovery, from what every survivor reported and did.

    `mttr_s` runs from the first fault that this recovery answers to the moment when the last
    survivor had completed the first step after it; phases are those of the slowest survivor.
    `cost_s` runs from the beginning of the interrupted step to its completion everywhere, less a
    step of before; `whole_cost_s` is what it would be had nobody kept work of that step. Both are
    None where that is not known.
    """
    reports: dict[int, list[Record]] = {}
    for event in run.of_kind("recovered"):
        if not event["newcomers"]:
            reports.setdefault(event["epoch"], []).append(event)
    found, answered_s = [], 0.0
    for epoch in sorted(reports):
        done_s = first_step_done_s(run, epoch)
        fault_s = _first_fault_s(run, answered_s, done_s)
        phases = _slowest_phases(run, epoch, reports[epoch], fault_s)
        reported_s = max(float(event["mttr_s"]) for event in reports[epoch])
        seen = done_s is not None and fault_s is not None
        cost_s = _cost_s(reports[epoch], done_s, _step_before_s(run, epoch))
        kept_s = max(float(event.get("kept_s", 0.0)) for event in reports[epoch])
        found.append(
            {
                "epoch": epoch,
                "reason": reports[epoch][0]["reason"],
                "phases_s": phases,
                "mttr_s": done_s - fault_s if seen and done_s and fault_s else reported_s,
                "reported_mttr_s": reported_s,
                "step_before_s": _step_before_s(run, epoch),
                "cost_s": cost_s,
                "whole_cost_s": None if cost_s is None else cost_s + kept_s,
                "bytes_moved": int(reports[epoch][0]["bytes_moved"]),
                "restored_step": int(reports[epoch][0]["restored_step"]),
                "survivors": sorted(event["slot"] for event in reports[epoch]),
            }
        )
        answered_s = done_s if done_s is not None else answered_s
    return found


def _step_before_s(run: RunFiles, epoch: int) -> float | None:
    """Return the median seconds of a step in the views before; None where they had one step."""
    times = [one["median_step_s"] for one in throughput(run) if one["epoch"] < epoch]
    return next((float(time_s) for time_s in reversed(times) if time_s is not None), None)


def _cost_s(reports: Sequence[Record], done_s: float | None, step_s: float | None) -> float | None:
    """Return what a loss cost in seconds; None for a run of a version that does not tell."""
    begun = [float(one["begun_at_s"]) for one in reports if "begun_at_s" in one]
    if not begun or done_s is None or step_s is None:
        return None
    return done_s - min(begun) - step_s


def survivor_pids_unchanged(run: RunFiles) -> bool:
    """Tell whether every worker of all views ran from start to end in the process it began in."""
    views = [set(event["ranks"]) for event in run.of_kind("view_committed")]
    survivors = set.intersection(*views) if views else set()
    counted = counted_steps(run)
    if not survivors or not counted:
        return False
    started: dict[int, set[int]] = {}
    for event in run.of_kind("worker_started"):
        started.setdefault(event["slot"], set()).add(event["pid"])
    worked: dict[int, set[int]] = {}
    for record in run.steps:
        worked.setdefault(record["slot"], set()).add(record["pid"])
    at_the_end = {record["slot"] for record in counted[max(counted)]}
    return survivors <= at_the_end and all(
        len(started.get(slot, ())) == 1 and started[slot] == worked.get(slot) for slot in survivors
    )


def median_step_s(run: RunFiles) -> dict[str, float | None]:
    """Return the median time of a step before the first change and after the last, in seconds.

    A step takes as long as its slowest worker; the first step of the job and the first after a
    change are not counted.
    """
    spans = throughput(run)
    began = spans[:1] if spans and spans[0]["reason"] == LAUNCH else []
    return {
        "before": began[0]["median_step_s"] if began else None,
        "after": spans[-1]["median_step_s"] if spans[len(began) :] else None,
    }


def throughput(run: RunFiles) -> list[Record]:
    """Return one record a view with complete steps: why it came, its steps, how fast they are.

    `median_step_s` is of its steps except the first, `tokens_per_s` what that makes of a global
    batch; both None where there is one step only. `cuts`: the first layer of each stage and their
    number, where there are stages.
    """
    by_epoch: dict[int, list[tuple[int, Sequence[Record]]]] = {}
    for step, records in sorted(counted_steps(run).items()):
        by_epoch.setdefault(records[0]["epoch"], []).append((step, records))
    changes = {event["epoch"]: event for event in run.of_kind("recovered")}
    layouts = [change[key] for change in changes.values() for key in _LAYOUTS if key in change]
    cuts = layouts[0]["cuts"] if layouts else None
    found: list[Record] = []
    for epoch, steps in sorted(by_epoch.items()):
        if epoch in changes and layouts:
            cuts = changes[epoch]["layout_after"]["cuts"]
        times = [max(float(one["step_s"]) for one in records) for _, records in steps[1:]]
        step_s = median(times) if times else None
        tokens = float(steps[0][1][0].get("tokens") or 0)
        found.append(
            {
                "epoch": epoch,
                "reason": changes[epoch]["reason"] if epoch in changes else LAUNCH,
                "cuts": cuts,
                "first_step": steps[0][0],
                "steps": len(steps),
                "median_step_s": step_s,
                "tokens_per_s": tokens / step_s if step_s and tokens else None,
            }
        )
    return found


def layout_change_of(run: RunFiles) -> Record:
    """Return the layouts, plan and step times of a change of layout; nothing where none was."""
    return layout_fields(
        attached=run.of_kind("attached"),
        recovered=run.of_kind("recovered"),
        nodes={event["slot"]: event["node"] for event in run.of_kind("worker_started")},
        step_s=median_step_s(run),
    )


def tokens_per_s(run: RunFiles) -> dict[int, float]:
    """Return the tokens of the global batch per second of the slowest worker, for each step."""
    rates = {}
    for step, records in counted_steps(run).items():
        slowest_s = max(float(record["step_s"]) for record in records)
        if slowest_s > 0:
            rates[step] = float(records[0].get("tokens") or 0) / slowest_s
    return rates


def summarize(
    run: RunFiles,
    reference: RunFiles | None,
    *,
    steps: int,
    global_batch: int | None,
    kills: Sequence[Kill] | None = None,
    snapshot_overhead_ratio: float | None = None,
    snapshot_overhead_reason: str = "not measured in this run",
) -> Record:
    """Build the summary of a run against its reference; every field comes from the files.

    ``global_batch``: None where it is not known or not the same in every step.
    """
    losses = losses_of(run)
    others = losses_of(reference) if reference else {}
    common = sorted(set(losses) & set(others))
    views, batches = counting_views(run.steps), steps * [global_batch or 0]
    if global_batch is None:
        batches = batch_sizes(views, run.ledger, steps)
    lost, repeated = audit_samples(run, batches=batches)
    return {
        "ended": ended_with(run),
        "steps": len(losses),
        "losses": [losses[step] for step in sorted(losses)],
        "reference_losses": [others[step] for step in sorted(others)],
        "max_abs_loss_diff": max(
            (abs(losses[step] - others[step]) for step in common), default=None
        ),
        "disagreeing_steps": disagreeing_steps(run),
        "differing_reports": differing_reports(run.of_kind("recovered")),
        "kills": kills_of(run, kills),
        "changes": changes_of(run),
        "recoveries": recoveries_of(run),
        "joins": joins_of(run),
        **_state_fields(run, reference),
        "survivor_pids_unchanged": survivor_pids_unchanged(run),
        "samples_lost": lost,
        "samples_repeated": repeated,
        "median_step_s": median_step_s(run),
        "first_step_rehearsal": run_twice(run, "first_step_rehearsed"),
        "layer_repetition": run_twice(run, "layer_repeated"),
        "throughput": throughput(run),
        **layout_change_of(run),
        "snapshot_overhead_ratio": snapshot_overhead_ratio,
        "snapshot_overhead_reason": (
            None if snapshot_overhead_ratio is not None else snapshot_overhead_reason
        ),
    }


def ended_with(run: RunFiles) -> Record | None:
    """Exit code and reason of the job, as its agents agreed on them; None where it goes on.

    Where all were told to leave it is that of the launchers, which is the signal's.
    """
    over = run.of_kind("job_over")
    if not over:
        return None
    code, reason = over[-1]["exit_code"], over[-1]["reason"]
    told = {event["exit_code"] for event in run.of_kind("job_ended")}
    if code == EXIT_TOLD and len(told) == 1:
        (code,) = told
    return {"exit_code": code, "reason": reason}


def run_twice(run: RunFiles, kind: str) -> Record | None:
    """Return what running something once more found and took, seconds of the slowest worker.

    None if the job left it out, as it tells by no event of this kind.
    """
    told = run.of_kind(kind)
    if not told:
        return None
    slots = {one["slot"] for one in told}
    seconds = (sum(one["seconds"] for one in told if one["slot"] == slot) for slot in slots)
    return {"equal": all(one["equal"] for one in told), "seconds": max(seconds)}


def _state_fields(run: RunFiles, reference: RunFiles | None) -> Record:
    """Compare the last dumped states; equal is None where there is nothing to compare."""
    fields: Record = {"parameters_equal": None, "state_sha256": {}, "differing_parameters": []}
    if not dumped_steps(run.directory):
        return fields
    mine = hash_state(run.directory)
    fields["state_sha256"] = {"step": mine.step, "run": mine.sha256, "reference": None}
    if reference is not None:
        other = hash_state(reference.directory)
        fields["state_sha256"]["reference"] = other.sha256
        fields["parameters_equal"] = (mine.step, mine.sha256) == (other.step, other.sha256)
        fields["differing_parameters"] = list(differing_names(mine, other))
    return fields


def _loss(record: Record) -> float:
    text = record.get("loss_hex")
    return float.fromhex(text) if text else float(record["loss"])


def _norm(record: Record) -> str:
    return record.get("grad_norm_hex") or repr(record.get("grad_norm"))


def _first_fault_s(run: RunFiles, after_s: float, before_s: float | None) -> float | None:
    """Return when the earliest fault in a span of time struck.

    The time is the one that the worker tells, else the one at which its end was seen.
    """
    until_s = float("inf") if before_s is None else before_s
    for kind, key in (("fault_fired", "at_s"), ("worker_exited", "time_s")):
        times = [e[key] for e in run.of_kind(kind) if after_s < e[key] < until_s]
        if times:
            return float(min(times))
    return None


def _slowest_phases(
    run: RunFiles, epoch: int, reports: list[Record], fault_s: float | None
) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name in RECOVERY_PHASES:
        times = [float(event["phases_s"][name]) for event in reports if name in event["phases_s"]]
        phases[name] = max(times, default=0.0)
    proposed = [e["time_s"] for e in run.of_kind("view_proposed") if e["epoch"] <= epoch]
    after = [time_s for time_s in proposed if fault_s is not None and time_s > fault_s]
    if not phases["detect"] and after and fault_s is not None:
        phases["detect"] = min(after) - fault_s
    return phases
