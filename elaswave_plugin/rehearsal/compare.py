"""Compares what two runs recorded, and names the first difference: pure.

What all workers of a part of the model have alike in the undisturbed run, each worker of the other
run has to have at the same moment; what is each worker's own there is not compared.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
# The moments of a step in their order, and what is compared at each.
_STATE, _PASS, _LOSSES, _NORM, _END = 0, 1, 2, 3, 4
SAMPLE, DRAW, LOSS, NORM = "sample", "draw", "loss", "gradient norm"
WEIGHT, SETTING, KEPT, BETWEEN, OWN = "tensor", "setting", "kept object", "generator", "script"
OPTIMIZER, RESULT, ENDED = "optimizer state", "result", "end of the job"
# What has other names where workers have other shares.
_OF_PASSES = (SAMPLE, DRAW, LOSS)
_ORDER = (
    *(SETTING, KEPT, OWN, WEIGHT, BETWEEN, SAMPLE, DRAW, LOSS, NORM, OPTIMIZER, RESULT, ENDED),
)
_NUMBER = re.compile(r"\(?-?(\d[\d.e+/j-]*|inf|nan)\)?|True|False")


class Moment(NamedTuple):
    """A moment of a step: before it begins, in a pass of it, at its losses, at its norm."""

    step: int
    order: int


class Named(NamedTuple):
    """One thing that is compared: its kind, the part of the model that has it, and its name."""

    kind: str
    part: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not what it was in the other run.

    ``numbers``: what it is and what it was, if those are numbers; ``where``: lines of the script.
    """

    moment: Moment
    kind: str
    name: str
    slots: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        before = self.moment.order == _STATE
        when = f"before step {self.moment.step}" if before else f"in step {self.moment.step}"
        who = f", on worker {', '.join(map(str, self.slots))}" if self.slots else ""
        said = self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"
        shown = f" ({' for '.join(self.numbers)})" if self.numbers else ""
        return f"{said} {when}{who}{shown}"

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can carry."""
        return {
            "step": self.moment.step,
            "before_step": self.moment.order == _STATE,
            "kind": self.kind,
            "name": self.name,
            "workers": list(self.slots),
            "where": list(self.where),
            "also_differ": list(self.also),
            "numbers": list(self.numbers),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All records of a run."""

    records: tuple[Record, ...]

    @classmethod
    def read(cls, folder: Path) -> "RunRecords":
        """Those of a folder; the last line of a process that was killed may be half written."""
        found: list[Record] = []
        for path in sorted(folder.glob("*.jsonl")):
            *lines, last = path.read_text("utf-8").split("\n")
            assert not last or lines, path
            found += [json.loads(line) for line in lines if line]
        return cls(records=tuple(found))

    @property
    def facts(self) -> Record | None:
        """The facts of the job, as its first worker said them; None where none has attached."""
        return next((one for one in self.records if one["kind"] == "facts"), None)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the script."""
        files = (one["files"] for one in self.records if one["kind"] == "facts")
        return tuple(dict.fromkeys(name for several in files for name in several))

    def without_undone(self, restored: Mapping[int, int]) -> "RunRecords":
        """Drop steps that a later view began again; ``restored``: the step of each view.

        A step that some had completed when another was lost is made again by fewer workers, whose
        sums have bits of their own. It is made again within the script's next call, so what the
        script kept of it, as its loss, may be of the first time: that is only a note.
        """
        kept = []
        for one in self.records:
            at, view = one.get("at", 0), one["view"]
            if any(later > view and at > begun for later, begun in restored.items()):
                continue
            again = any(then <= view and at - 1 == begun for then, begun in restored.items())
            if again and one["kind"] == "state":
                one = {**one, "script": {}, "values": {**one["values"], **one["script"]}}
            kept.append(one)
        return RunRecords(records=tuple(kept))

    def of_launch(self) -> "RunRecords":
        """Return those of workers that did not come later."""
        return RunRecords(records=tuple(one for one in self.records if not one["incarnation"]))

    def first_times(self, *, came: bool) -> "RunRecords":
        """Return what each worker had when it first came to a step.

        ``came``: of those that came back, or else of those of the launch.
        """
        seen: dict[tuple[int, int, int], Record] = {}
        for one in self.records:
            if one["kind"] == "state" and bool(one["incarnation"]) == came:
                seen.setdefault((one["slot"], one["incarnation"], one["at"]), one)
        return RunRecords(records=tuple(seen.values()))

    def values(self) -> Iterator[tuple[Moment, Named, int, Any]]:
        """(moment, what, worker, value), one by one."""
        for record in self.records:
            for moment, what, value in _values_of(record):
                yield moment, what, record["slot"], value

    def notes(self) -> Iterator[tuple[Moment, Named, int, Any]]:
        """Yield what the script's variables hold, plain values and others, likewise."""
        for record in self.records:
            if record["kind"] == "state":
                for name, value in {**record["values"], **record["script"]}.items():
                    moment = Moment(record["at"], _STATE)
                    yield moment, Named(OWN, record["part"], name), record["slot"], value


def _values_of(record: Record) -> Iterator[tuple[Moment, Named, Any]]:
    part, kind = record["part"], record["kind"]
    if kind == "state":
        at = Moment(record["at"], _STATE)
        for name, value in record["tensors"].items():
            yield at, Named(WEIGHT, "", name), value
        for kind, key in (
            (SETTING, "settings"),
            (KEPT, "kept"),
            (BETWEEN, "draws"),
            (OWN, "script"),
        ):
            for name, value in record[key].items():
                yield at, Named(kind, part, name), value
    elif kind == "pass":
        at = Moment(record["at"], _PASS)
        again = f" (call {record['call'] + 1})" if record["call"] else ""
        name = f"{record['pass']}{again}"
        if "batch" in record:
            yield at, Named(SAMPLE, part, f"batch of {name}"), record["batch"]
        for generator, state in record["draws"].items():
            yield at, Named(DRAW, part, f"of {generator} in {name}"), state
    elif kind == "result":
        for name, value in record["results"].items():
            yield Moment(record["at"], _STATE), Named(RESULT, part, f"of {name}"), value
    elif kind == "losses":
        for name, value in record["losses"].items():
            yield Moment(record["at"], _LOSSES), Named(LOSS, "", f"of {name}"), value


class Reference:
    """The values that were alike on all workers of a part in the undisturbed run, and no others.

    ``twin``: the run with the same changes as planned, for what has bits of its own after a loss.
    """

    def __init__(self, undisturbed: RunRecords) -> None:
        self._common = dict(_common(undisturbed.values()))
        self._notes = dict(_common(undisturbed.notes()))
        every = {what for _, what, _, _ in undisturbed.values() if what.kind not in _OF_PASSES}
        own = every - {what for _, what in self._common}
        self.own = tuple(sorted({f"{one.kind} {one.name.partition('[')[0]}" for one in own}))
        """What each worker has of its own, so that it is not compared, by kind and name."""

    def differences(self, run: RunRecords) -> list[Difference]:
        """List everything of ``run`` that differs, the first one first."""
        return _differing(self._common, run.values())

    def notes(self, run: RunRecords) -> list[Difference]:
        """Plain values of the script that differ."""
        return _differing(self._notes, run.notes())

    def far_results(self, run: RunRecords, bound: float) -> list[Difference]:
        """List numbers that work between steps returned, and that are off by more than ``bound``.

        It is relative to the larger one.
        """
        far = (
            one
            for one in run.values()
            if one[1].kind == RESULT and _is_far(one[3], self._common.get(one[:2]), bound)
        )
        return _differing(self._common, far)

    def of_newcomers(self, run: RunRecords) -> list[Difference]:
        """List numbers of the script that a worker which came back has otherwise, each once.

        They are alike on all workers in the undisturbed run. What those who stayed have like it is
        of the run, as its time is, or its sums in another order.
        """
        came, stayed = run.first_times(came=True), run.first_times(came=False)
        known: dict[Key, set[Any]] = defaultdict(set)
        for moment, what, _, value in stayed.notes():
            known[moment, what].add(value)
        notes = (
            (moment, what, slot, value)
            for moment, what, slot, value in came.notes()
            if value not in known[moment, what]
            and (known[moment, what] or not isinstance(value, str) or "." not in value)
        )
        return _each_once([one for one in _differing(self._notes, notes) if one.numbers])

    def of_survivors(self, run: RunRecords) -> list[Difference]:
        """List counts of the script that a worker which stayed has otherwise, each once.

        Whole numbers that change from step to step in the undisturbed run, on all workers alike: a
        step that is made again may have counted twice, also where the changes are planned.
        """
        values: dict[Named, set[Any]] = defaultdict(set)
        for (_, what), value in self._notes.items():
            values[what].add(value)
        notes = (
            one
            for one in run.of_launch().notes()
            if len(values[one[1]]) > 1 and _is_count(one[3]) and all(map(_is_count, values[one[1]]))
        )
        return _each_once(_differing(self._notes, notes))

    def restricted(self, twin: RunRecords) -> "Reference":
        """The values of the twin, for all that is alike on all workers in the undisturbed run."""
        # Results of evaluations are sums in another order where they meet a loss: `far_results`.
        names = {what for _, what in self._common if what.kind != RESULT}
        restricted = object.__new__(Reference)
        found = _common(twin.values())
        restricted._common = {
            key: one for key, one in found if key[1] in names or key[1].kind in _OF_PASSES
        }
        restricted._notes = dict(_common(twin.notes()))
        return restricted


Key = tuple[Moment, Named]


def _common(values: Iterable[tuple[Moment, Named, int, Any]]) -> Iterator[tuple[Key, Any]]:
    found: dict[Key, dict[int, set[Any]]] = defaultdict(lambda: defaultdict(set))
    having: dict[tuple[Moment, str], set[int]] = defaultdict(set)
    for moment, what, slot, value in values:
        found[moment, what][slot].add(value)
        having[moment, what.part].add(slot)
    for (moment, what), by_slot in found.items():
        distinct = set().union(*by_slot.values())
        if len(distinct) != 1:
            continue
        if what.kind in (OWN, BETWEEN) and set(by_slot) != having[moment, what.part]:
            continue
        yield (moment, what), next(iter(distinct))


def _differing(
    common: Mapping[Key, Any], values: Iterable[tuple[Moment, Named, int, Any]]
) -> list[Difference]:
    slots: dict[Key, set[int]] = defaultdict(set)
    seen: dict[Key, Any] = {}
    for moment, what, slot, value in values:
        key = moment, what
        if key in common and common[key] != value:
            slots[key].add(slot)
            seen.setdefault(key, value)
    ordered = sorted(slots, key=lambda key: (*key[0], _ORDER.index(key[1].kind), key[1]))
    return [
        Difference(
            moment=key[0],
            kind=key[1].kind,
            name=key[1].name,
            slots=tuple(sorted(slots[key])),
            numbers=_numbers(key[1].kind, seen[key], common[key]),
        )
        for key in ordered
    ]


def _each_once(found: Sequence[Difference]) -> list[Difference]:
    """The first difference of each variable, in order."""
    first = {one.name.partition("[")[0]: one for one in reversed(found)}
    return list(first.values())[::-1]


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal()


def _is_far(value: Any, wanted: Any, bound: float) -> bool:
    try:
        one, other = float(value), float(wanted)
    except (TypeError, ValueError):
        return False
    if other == 0:  # the scale of its terms is not known
        return abs(one) > bound
    both_nan = math.isnan(one) and math.isnan(other)
    return not (both_nan or math.isclose(one, other, rel_tol=bound))


def _numbers(kind: str, *both: Any) -> tuple[str, ...]:
    """Return what is there and what was wanted, if one of them is a number."""
    if kind not in (OWN, RESULT) or not all(isinstance(one, str) for one in both):
        return ()
    return both if any(map(_NUMBER.fullmatch, both)) else ()


def step_differences(
    mine: Mapping[int, tuple[float, float]], others: Mapping[int, tuple[float, float]]
) -> list[Difference]:
    """List differences of loss and gradient norm of each step; both are bits, as floats."""
    found = []
    for step in sorted({*mine, *others}):
        here, there = mine.get(step), others.get(step)
        if here is None or there is None:
            found.append(Difference(moment=Moment(step, _END), kind=ENDED, name="came early"))
            continue
        for kind, one, other in zip((LOSS, NORM), here, there, strict=True):
            if one.hex() != other.hex():
                said = f"{one!r} for {other!r}"
                found.append(Difference(moment=Moment(step, _NORM), kind=kind, name=said))
    return found
