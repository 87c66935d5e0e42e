"""Convoys: jobs with several faults, each of which is a case of a family.

`convoys` deals out the cases of a family, `convoy` runs those of one that were selected, once, and
`Convoy.check` judges a case. `pytest FILE::TEST[CASE]` runs a case alone. A return costs half as
much as a small job, so most convoys have none: 4 workers become 1. Where a job is dear, or would
not have places for all losses, who was lost is back before the next fault.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elaswave_plugin.config import Kill, parse_kill
from tests.faults.harness import JobSpec, Outcome, Trace
from tests.sample import sampled

# A worker comes back so many steps behind its loss: one at least is made without it.
AWAY = 2
# The agent waits half a second by itself, and no processor works then.
RESPAWN_S = 0.02
Runs = dict[tuple[str, int], Outcome]


def convoys(
    cases: Iterable[Any], spec_of: Callable[..., JobSpec], *, most: int = 3, returns: bool = False
) -> list[Any]:
    """The cases of a parameter, an eighth of whose convoys is in each part.

    ``spec_of(*case)``: the launch of a case alone, with one kill. A convoy has up to ``most`` cases
    of one job, each with another victim, in an order that is drawn; ``returns``: who is lost comes
    back before the next fault. The first case stays alone.
    """
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    specs = [spec_of(*case) for case in every]
    found = {}
    dealt = dealt_out(specs, most=most)
    for number, (convoy, drawn) in enumerate(zip(dealt, sampled(range(len(dealt))), strict=True)):
        for place, index in enumerate(convoy):
            mark = pytest.mark.convoy(number, place, specs[index], returns)
            found[index] = pytest.param(*every[index], marks=[*drawn.marks, mark])
    return [found[index] for index in range(len(every))]


def dealt_out(specs: Sequence[JobSpec], *, most: int) -> list[list[int]]:
    """The numbers of the cases of each convoy, in the order of their faults."""
    dice = random.Random(repr(specs))
    decks: dict[JobSpec, dict[int, list[int]]] = {}
    for index, spec in enumerate(specs[1:], start=1):
        deck = decks.setdefault(replace(spec, kills=()), {})
        deck.setdefault(kill_of(spec).slot, []).append(index)
    found = [[0]]
    for deck in decks.values():
        for some in deck.values():
            dice.shuffle(some)
        while any(deck.values()):
            # Victims with most cases first: so there are as few convoys as can be.
            victims = sorted(deck.values(), key=lambda some: (len(some), dice.random()))
            convoy = [some.pop() for some in victims[-most:] if some]
            dice.shuffle(convoy)
            found.append(convoy)
    return found


def joined(specs: Sequence[JobSpec], *, returns: bool) -> JobSpec:
    """One launch with the kills of all: each in its own step, counted from the turn's begin."""
    kills, changes, begin = [], [], 0
    for spec in specs:
        kill = kill_of(spec)
        kills.append(str(replace(kill, step=begin + kill.step)))
        begin += kill.step + AWAY if returns else 1
        changes.append(f"+{kill.slot}@{begin}")
    if not returns or len(specs) == 1:
        return replace(specs[0], kills=tuple(kills))
    return replace(
        specs[0],
        steps=specs[0].steps + begin - kill_of(specs[-1]).step - AWAY,
        kills=tuple(kills),
        changes=tuple(changes[:-1]),
        respawn=len(specs),
        respawn_s=RESPAWN_S,
    )


def kill_of(spec: JobSpec) -> Kill:
    """The only one of a case."""
    (kill,) = spec.kills
    return parse_kill(kill)


@dataclass(frozen=True, slots=True)
class Convoy:
    """A job that has run, and the place of the fault of the case that asks."""

    run: Outcome
    place: int

    @property
    def undisturbed(self) -> JobSpec:
        """The launch that nothing disturbs."""
        return replace(self.run.spec, kills=(), changes=(), respawn=0, respawn_s=None)

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
        """The events of the recovery from the own fault."""
        kills, found = self.run.spec.kills, recoveries(self.run)
        assert kills[self.place] in found, f"not recovered from {kills[self.place]}"
        return found[kills[self.place]]

    def check(self, wanted: Trace, whole: Callable[[], None]) -> None:
        """Fail for a difference behind the own fault, skip for one behind an earlier fault.

        ``whole()`` raises AssertionError for what has no step: then all cases fail.
        """
        differs = first_difference(self.run.trace(), wanted)
        check_case(self.place, self.run.spec.kills, self._restored, differs)
        if differs is None:
            whole()
            assert self.recovered


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


def first_difference(ours: Trace, theirs: Trace) -> int | None:
    """Return the first step that is missing or another one in ``ours``; None if there is none."""
    return min((step for step in theirs if ours.get(step) != theirs[step]), default=None)


def blamed(kills: Sequence[str], restored: Mapping[str, int], differs: int) -> int:
    """Return the place of the fault behind which the first difference stands.

    ``kills``: in the order of their steps; ``restored``: the step to which the run rolled back, of
    those that it recovered from; ``differs``: the first step that is another one.
    """
    steps = [parse_kill(kill).step for kill in kills]
    first = [min(step, restored.get(kill, step)) for kill, step in zip(kills, steps, strict=True)]
    return max((place for place, step in enumerate(first) if step <= differs), default=0)


def check_case(
    place: int, kills: Sequence[str], restored: Mapping[str, int], differs: int | None
) -> None:
    """Fail if the fault of this place is to blame, skip if an earlier one is."""
    if differs is None:
        return
    fault = blamed(kills, restored, differs)
    said = f"another run from step {differs} on, after {kills[fault]} of {' '.join(kills)}"
    assert fault != place, said
    if fault < place:
        pytest.skip(f"not run: {said}; name the case by :: to run it alone")


@pytest.fixture(scope="session")
def played() -> Runs:
    """The convoys that have run, by test and number."""
    return {}


@pytest.fixture
def convoy(request: pytest.FixtureRequest, run: Callable[[Any], Outcome], played: Runs) -> Convoy:
    """The convoy of the selected cases that the asking one is of; it is run once."""
    test = request.node.nodeid.partition("[")[0]
    own = request.node.get_closest_marker("convoy").args
    others = [
        mark.args
        for item in request.session.items
        if item.nodeid.partition("[")[0] == test
        for mark in item.iter_markers("convoy")
        if mark.args[0] == own[0]
    ]
    others.sort(key=lambda args: args[1])
    if (test, own[0]) not in played:
        specs = [spec for _, _, spec, _ in others]
        played[test, own[0]] = run(joined(specs, returns=own[3]))
    return Convoy(played[test, own[0]], [args[1] for args in others].index(own[1]))
