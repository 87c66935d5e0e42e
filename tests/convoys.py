"""Convoys: jobs with several faults, each of which is a case of a family.

`convoys` deals out the cases of a family, `convoy` runs those of one that were selected, once, and
`Convoy.check` judges a case. `pytest FILE::TEST[CASE]` runs a case alone. Nobody comes back, 4
workers become 1: three losses take as long as one, and a return three quarters of a small job.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elaswave_plugin.config import parse_kill
from tests.faults.harness import JobSpec, Outcome, Trace
from tests.sample import sampled

Runs = dict[tuple[str, int], Outcome]


def convoys(
    cases: Iterable[Any],
    spec_of: Callable[..., JobSpec],
    *,
    most: int = 3,
    victim: Callable[[Any], object] = lambda fault: fault.slot,
    first: int | None = None,
) -> list[Any]:
    """The cases of a parameter, a twelfth of whose convoys is in each part.

    ``spec_of(*case)``: the launch of a case alone. A convoy has cases of one job with up to
    ``most`` faults, each with another ``victim``, in an order that is drawn where they are in the
    same step alone. ``first``: the step of the first fault, if it is not its own; then the order of
    all is drawn. The first case stays alone.
    """
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    specs = [spec_of(*case) for case in every]
    found = {}
    dealt = dealt_out(specs, most=most, victim=victim)
    for number, (convoy, drawn) in enumerate(zip(dealt, sampled(range(len(dealt))), strict=True)):
        if first is None:
            convoy.sort(key=lambda index: specs[index].faults[0].step)
        for place, index in enumerate(convoy):
            mark = pytest.mark.convoy(number, place, specs[index], first)
            found[index] = pytest.param(*every[index], marks=[*drawn.marks, mark])
    return [found[index] for index in range(len(every))]


def dealt_out(
    specs: Sequence[JobSpec],
    *,
    most: int,
    victim: Callable[[Any], object] = lambda fault: fault.slot,
) -> list[list[int]]:
    """The numbers of the cases of each convoy, in the order of their faults."""
    # By what is the same in every checkout.
    dice = random.Random(repr([tuple(map(str, spec.faults)) for spec in specs]))
    victims = [{*map(victim, spec.faults)} for spec in specs]
    rest = list(range(1, len(specs)))
    dice.shuffle(rest)
    found = [[0]]
    while rest:
        # Victims with most cases first: so there are as few convoys as can be.
        counts = Counter(one for index in rest for one in victims[index])
        rest.sort(key=lambda index: -max(counts[one] for one in victims[index]))
        convoy: list[int] = []
        for index in rest:
            others = set[object]().union(*(victims[one] for one in convoy))
            is_alike = not convoy or job_of(specs[index]) == job_of(specs[convoy[0]])
            has_place = not convoy or len(others) + len(victims[index]) <= most
            if is_alike and has_place and others.isdisjoint(victims[index]):
                convoy.append(index)
        rest = [index for index in rest if index not in convoy]
        dice.shuffle(convoy)
        found.append(convoy)
    return found


def job_of(spec: JobSpec) -> JobSpec:
    """The launch without faults."""
    return spec.struck_by(())


def joined(specs: Sequence[JobSpec], *, first: int | None = None) -> JobSpec:
    """One launch with the faults of all, each in a step of its own that has such a phase.

    That is the one that it has alone, or the next behind another fault.
    """
    if len(specs) == 1:
        return specs[0]
    faults: list[Any] = []
    step = specs[0].faults[0].step if first is None else first
    for fault in (fault for spec in specs for fault in spec.faults):
        if first is None:
            step = max(step, fault.step)
        step = specs[0].step_with(fault.phase, step)
        faults.append(replace(fault, step=step))
        step += 1
    return specs[0].struck_by(faults)


@dataclass(frozen=True, slots=True)
class Convoy:
    """A job that has run, and the faults of the case that asks."""

    run: Outcome
    own: tuple[str, ...]

    @property
    def planned(self) -> JobSpec:
        """The launch with each loss before the step to which the run rolled back, as it counted."""
        kills, restored = map(parse_kill, self.run.spec.kills), self._restored
        told = (f"{kill.slot}@{restored.get(str(kill), kill.step)}" for kill in kills)
        return replace(self.run.spec, kills=tuple(told))

    @property
    def _restored(self) -> dict[str, int]:
        found = recoveries(self.run).items()
        return {kill: events[0]["restored_step"] for kill, events in found}

    @property
    def recovered(self) -> list[dict[str, Any]]:
        """The events of the recoveries from the own faults."""
        found = recoveries(self.run)
        return [event for kill in self.own for event in found[kill]]

    def check(
        self,
        wanted: Trace,
        whole: Callable[[], None],
        *,
        ours: Trace | None = None,
        struck: Mapping[str, int] | None = None,
    ) -> None:
        """Fail for a difference behind an own fault, skip for one behind an earlier fault.

        ``whole()`` raises AssertionError for what has no step: then all cases fail.
        ``ours``: what is compared, if it is not the trace. ``struck``: where it is no recovery that
        shows that a fault struck, by fault the first step that may differ behind it.
        """
        faults, found = self.run.spec.faults, self._restored if struck is None else struck
        ours = self.run.trace() if ours is None else ours
        differs = first_difference(ours, wanted, faults, found)
        check_case(self.own, faults, found, differs, self.run.output[-2000:])
        if differs is None:
            whole()


def recoveries(run: Outcome) -> dict[str, list[dict[str, Any]]]:
    """The events of each recovery, by kill; each kill has another victim."""
    views = [(event["epoch"], event["ranks"]) for event in run.events("view_committed")]
    events = run.events("recovered")
    found = {}
    for kill in run.spec.kills:
        slot = parse_kill(kill).slot
        without = next((epoch for epoch, ranks in views if slot not in ranks), None)
        # A view that another loss superseded was recovered from together with that one.
        later = {event["epoch"] for event in events if without and event["epoch"] >= without}
        if later:
            found[kill] = [event for event in events if event["epoch"] == min(later)]
    return found


def first_difference(
    ours: Trace, theirs: Trace, faults: Sequence[Any], struck: Mapping[str, int]
) -> int | None:
    """Return the first step that is missing or another one in ``ours``, or whose fault is missing.

    None if there is none.
    """
    missing = {fault.step for fault in faults if str(fault) not in struck}
    differing = {step for step in ours | theirs if ours.get(step) != theirs.get(step)}
    return min(missing | differing, default=None)


def blamed(faults: Sequence[Any], struck: Mapping[str, int], differs: int) -> str:
    """Return the fault behind which the first difference stands, else the first one.

    ``faults``: in the order of their steps; ``struck``: of those that struck, the step to which the
    run rolled back; ``differs``: the first step that is another one.
    """
    steps = {str(fault): min(fault.step, struck.get(str(fault), differs)) for fault in faults}
    first, *_ = steps
    return [fault for fault in steps if fault == first or steps[fault] <= differs][-1]


def check_case(
    own: Sequence[str],
    faults: Sequence[Any],
    struck: Mapping[str, int],
    differs: int | None,
    output: str = "",
) -> None:
    """Fail if one of the ``own`` faults is to blame, skip if an earlier one is."""
    if differs is None:
        return
    order = [*map(str, faults)]
    fault = blamed(faults, struck, differs)
    said = f"another run from step {differs} on, after {fault} of {' '.join(order)}"
    assert fault not in own, f"{said}\n{output}"
    if order.index(fault) < order.index(own[0]):
        pytest.skip(f"not run: {said}; name the case by :: to run it alone")


def verdicts(run: Outcome, check: Callable[[Convoy], None]) -> list[str]:
    """Tell what becomes of a case of each fault of a run: for negative controls."""
    found = []
    for fault in map(str, run.spec.faults):
        try:
            check(Convoy(run, (fault,)))
        except AssertionError as error:
            found.append("fails" if f"after {fault} of" in str(error) else str(error))
        except pytest.skip.Exception:
            found.append("not run")
        else:
            found.append("passes")
    return found


@pytest.fixture(scope="session")
def played() -> Runs:
    """The convoys that have run, by test and number."""
    return {}


@pytest.fixture
def convoy(request: pytest.FixtureRequest, run: Callable[[Any], Outcome], played: Runs) -> Convoy:
    """The convoy of the selected cases that the asking one is of; it is run once."""
    test = request.node.nodeid.partition("[")[0]
    number, place, spec, first = request.node.get_closest_marker("convoy").args
    same = [item for item in request.session.items if item.nodeid.partition("[")[0] == test]
    marks = [mark.args for item in same for mark in item.iter_markers("convoy")]
    specs = {place: spec for convoy, place, spec, _ in marks if convoy == number}
    if (test, number) not in played:
        cases = [spec for _, spec in sorted(specs.items(), key=lambda one: one[0])]
        played[test, number] = run(joined(cases, first=first))
    before = sum(len(specs[one].faults) for one in specs if one < place)
    own = played[test, number].spec.faults[before : before + len(spec.faults)]
    return Convoy(played[test, number], tuple(map(str, own)))
