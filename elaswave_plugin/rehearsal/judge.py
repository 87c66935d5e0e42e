"""Judges one run of a rehearsal by what it left, against the undisturbed one or its twin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from elaswave_plugin.core.step.audit import batch_sizes, counting_views
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.observer import audit_samples
from elaswave_plugin.observer.run import RunFiles, counted_steps, read_run
from elaswave_plugin.rehearsal.compare import (
    BETWEEN,
    DRAW,
    ENDED,
    KEPT,
    NORM,
    OPTIMIZER,
    OWN,
    SAMPLE,
    SETTING,
    WEIGHT,
    Difference,
    Moment,
    Reference,
    RunRecords,
    step_differences,
)
from elaswave_plugin.rehearsal.launch import Ended
from elaswave_plugin.rehearsal.lines import (
    Find,
    changing_lines,
    drawing_lines,
    gradient_lines,
    lines_for,
    unordered_lines,
)
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.schedule import DisturbedRun, Facts
from elaswave_plugin.tracking.state_dump import (
    StateDumpError,
    StateHash,
    differing_names,
    hash_state,
)

_FILES = ("events.jsonl", "steps.jsonl", "ledger.jsonl")
_MOST_NOTES = 8
# Relative differences of an evaluation's number: of sums in another order, and in units of the
# largest one of a step's loss.
_OF_ORDER, _MOST_DRAWN = 1e-5, 10
# Kinds whose names are those of a script's own variables and settings.
_SET_BY_SCRIPTS = (OWN, SETTING, KEPT)
# What else a script may have done to make a difference of a kind.
_BY_KIND: tuple[tuple[str, Find], ...] = ((NORM, gradient_lines), (SAMPLE, unordered_lines))


@dataclass(frozen=True, kw_only=True)
class RunLeft:
    """The remains of a run: its files, its records and the digests of its last state."""

    files: RunFiles
    records: RunRecords
    state: StateHash | None

    @classmethod
    def read(cls, order: RunOrder) -> "RunLeft":
        """Raises ConfigurationError where there is no run directory of a job."""
        files = read_run(order.run_dir)
        try:
            state = hash_state(order.run_dir)
        except StateDumpError:
            state = None
        return cls(files=files, records=RunRecords.read(order.records), state=state)

    @cached_property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each step, exact to the bit."""
        return {
            step: (float.fromhex(lines[0]["loss_hex"]), float.fromhex(lines[0]["grad_norm_hex"]))
            for step, lines in counted_steps(self.files).items()
        }

    @property
    def final_records(self) -> RunRecords:
        """The records without those of completed steps that were made again."""
        return self.records.without_undone(_restored_steps(self.files))

    @property
    def batches(self) -> list[int]:
        """Samples of each step."""
        last = max(self.steps, default=-1) + 1
        return batch_sizes(counting_views(self.files.steps), self.files.ledger, last)


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """The run that all others are compared with."""

    left: RunLeft
    facts: Facts
    reference: Reference

    @classmethod
    def read(cls, order: RunOrder, ended: Ended, *, steps: int) -> "Undisturbed":
        """Raises ConfigurationError for a run that is none to compare with."""
        records = RunRecords.read(order.records)
        facts = records.facts
        if facts is None:
            how = f"it ended with exit code {ended.exit_code}: {ended.sentence}"
            raise ConfigurationError(
                f"the command never attached to elaswave_plugin, as job.bind, deepspeed.initialize "
                f"with the section or pretrain with --elaswave do; {how}"
            )
        if ended.exit_code:
            raise ConfigurationError(
                f"the undisturbed run ended with exit code {ended.exit_code}: {ended.sentence}"
            )
        left = RunLeft.read(order)
        if len(left.steps) < steps:
            raise ConfigurationError(
                f"the script ended by itself after {len(left.steps)} steps, wanted {steps}: give "
                f"it more steps to make, or the rehearsal --steps {max(5, len(left.steps))}"
            )
        known = {name: facts[name] for name in ("width", "parts", "exact", "returns", "rotates")}
        return cls(left=left, facts=Facts(**known), reference=Reference(records))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run: what was done to it, and what is not as it was in the run that it has to equal."""

    run: DisturbedRun
    ended: Ended
    compared_with: str
    fired: tuple[str, ...]
    first: Difference | None
    count: int
    of_newcomers: tuple[Difference, ...] = ()
    of_survivors: tuple[Difference, ...] = ()
    largest_loss_difference: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can carry."""
        kills = [str(one) for one in self.run.kills]
        return {
            "name": self.run.name,
            "title": self.run.title,
            "kills": [{"kill": one, "fired": one in self.fired} for one in kills],
            "changes": [str(one) for one in self.run.changes],
            "seconds": self.ended.seconds,
            "exit_code": self.ended.exit_code,
            "compared_with": self.compared_with,
            "equal": self.first is None,
            "differences": self.count,
            "first_difference": None if self.first is None else self.first.to_json(),
            "first_difference_said": None if self.first is None else str(self.first),
            "numbers_of_newcomers": [one.to_json() for one in self.of_newcomers],
            "numbers_of_survivors": [one.to_json() for one in self.of_survivors],
            "largest_loss_difference": self.largest_loss_difference,
        }


def judge(
    run: DisturbedRun,
    order: RunOrder,
    ended: Ended,
    undisturbed: Undisturbed,
    *,
    twin: tuple[RunOrder, Ended] | None = None,
) -> Judged:
    """Compare a run; ``twin``: the one with the same changes as planned, which it has to equal."""
    left = RunLeft.read(order)
    other, reference, name = undisturbed.left, undisturbed.reference, "undisturbed"
    records, found = left.records, list[Difference]()
    if twin is not None:
        other, name = RunLeft.read(twin[0]), "the same changes as planned"
        reference = reference.restricted(other.records)
        records = left.final_records
        found += _ended_early(twin[1], other, "the run with the changes as planned")
        found += _of_results(records, undisturbed, left=left, twin=other)
    found += _ended_early(ended, left, "the job")
    found += reference.differences(records)
    if not ended.exit_code:
        found += step_differences(left.steps, other.steps)
        found += _of_samples(left, undisturbed.left.batches)
        found += _of_states(left, other)
    found.sort(key=lambda one: one.moment)
    first = found[0] if found else None
    if first is not None:
        notes = reference.notes(records)
        first = _explained(first, [*found[1:], *notes], records.files)
    newcomers = undisturbed.reference.of_newcomers(left.records)
    survivors = undisturbed.reference.of_survivors(left.final_records)
    return Judged(
        run=run,
        ended=ended,
        compared_with=name,
        fired=tuple(_fired(run, left.files)),
        first=first,
        count=len(found),
        of_newcomers=tuple(_placed(one, records.files) for one in newcomers),
        of_survivors=tuple(_placed(one, records.files) for one in survivors),
        largest_loss_difference=_largest(left, undisturbed.left),
    )


def _of_results(
    records: RunRecords, undisturbed: Undisturbed, *, left: RunLeft, twin: RunLeft
) -> list[Difference]:
    """Numbers of evaluations off by more than an order of sums, or than draws of other shares.

    A number that follows the workers does so in the twin too: one that lacks a worker of the launch
    is off by its part.
    """
    steps = _largest(left, undisturbed.left) or 0.0
    bound = max(1 / (2 * undisturbed.facts.width), _MOST_DRAWN * steps)
    found = Reference(twin.records).far_results(records, _OF_ORDER)
    return found or undisturbed.reference.far_results(records, bound)


def _ended_early(ended: Ended, left: RunLeft, who: str) -> list[Difference]:
    if not ended.exit_code:
        return []
    step = max(left.steps, default=-1) + 1
    said = f"{who} ended with exit code {ended.exit_code}: {ended.sentence}"
    return [Difference(moment=Moment(step, 4), kind=ENDED, name=said)]


def _of_samples(left: RunLeft, batches: Sequence[int]) -> list[Difference]:
    lost, repeated = audit_samples(left.files, batches=batches)
    if not lost and not repeated:
        return []
    name = f"{lost} samples lost, {repeated} repeated"
    return [Difference(moment=Moment(len(batches), 4), kind=SAMPLE, name=name)]


def _of_states(left: RunLeft, other: RunLeft) -> list[Difference]:
    """Parameters and moments after the last step."""
    if left.state is None or other.state is None:
        return []
    moment = Moment(left.state.step, 4)
    names = differing_names(left.state, other.state)
    return [Difference(moment=moment, kind=OPTIMIZER, name=f"of {name}") for name in names]


def _explained(first: Difference, others: Sequence[Difference], files: Iterable[str]) -> Difference:
    """Add the lines of the script that may have made it, and what else differs by then."""
    until = first.moment.step + 1
    also = [one for one in others if one.moment.step <= until and one.name != first.name]
    names = [one.name for one in (first, *also) if one.kind in _SET_BY_SCRIPTS]
    drawn = _drawn(first)
    finds: list[Find] = [find for kind, find in _BY_KIND if kind == first.kind]
    if drawn is not None:
        finds.append(partial(drawing_lines, generator=drawn))
    else:
        finds += [partial(changing_lines, name=name) for name in names]
    where = [] if first.kind == ENDED else lines_for(files, finds)
    said = {_group(one): str(one) for one in reversed(also)}
    return replace(first, where=tuple(where), also=tuple(reversed(said.values()))[:_MOST_NOTES])


def _placed(number: Difference, files: Iterable[str]) -> Difference:
    """Add the lines of the script that may set a number."""
    return replace(
        number, where=tuple(lines_for(files, [partial(changing_lines, name=number.name)]))
    )


def _group(one: Difference) -> str:
    """Name the group of a difference, of which only the first is said.

    Each part of the model, each variable of the script and each other kind is a group.
    """
    if one.kind == WEIGHT:
        return one.name.partition(".")[0]
    return f"script {one.name.partition('[')[0]}" if one.kind == OWN else one.kind


def _drawn(first: Difference) -> str | None:
    """The generator of which a difference is."""
    if first.kind == DRAW:
        return first.name.split()[1]
    return first.name if first.kind == BETWEEN else None


def _fired(run: DisturbedRun, files: RunFiles) -> Iterable[str]:
    hit = {(one["slot"], one["step"], one["phase"]) for one in files.of_kind("fault_fired")}
    return (str(kill) for kill in run.kills if (kill.slot, kill.step, kill.phase) in hit)


def _largest(left: RunLeft, other: RunLeft) -> float | None:
    """The largest relative difference of a step's loss."""
    both = [
        (left.steps[step][0], other.steps[step][0]) for step in left.steps if step in other.steps
    ]
    return max((abs(one - two) / abs(two) for one, two in both if two), default=None)


def twin_changes(order: RunOrder) -> list[str]:
    """The same changes of the view as planned ones, at the steps that the run went back to."""
    files = read_run(order.run_dir)
    views = {one["epoch"]: set(one["ranks"]) for one in files.of_kind("view_committed")}
    steps = _restored_steps(files)
    before, changes = views[min(views)], list[str]()
    for epoch in sorted(steps):
        now = views[epoch]
        changes += [f"{slot}@{steps[epoch]}" for slot in sorted(before - now)]
        changes += [f"+{slot}@{steps[epoch]}" for slot in sorted(now - before)]
        before = now
    return changes


def _restored_steps(files: RunFiles) -> dict[int, int]:
    """The step from which each view went on, by the view's number."""
    return {one["epoch"]: one["restored_step"] for one in files.of_kind("recovered")}
