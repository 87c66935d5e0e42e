"""The runs that a rehearsal makes, with the victim and the moment of each kill: pure.

>>> facts = Facts(width=4, parts=1, exact=True, returns=True)
>>> for run in disturbed_runs(facts, steps=6):
...     print(run.name, *run.kills)
dealt-otherwise
losses 0@1:body 3@2:optimizer
returns 0@0:data 1@0:forward 2@1:body 3@1:snapshot 0.1@3:backward 1.1@3:reduce 2.1@4:optimizer \
3.1@4:gather
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elaswave_plugin.config import Change, Kill
from elaswave_plugin.words import check_words

PHASES = ("data", "forward", "body", "snapshot", "backward", "reduce", "optimizer", "gather")
# Those that end a step: it takes one step more until everybody is back.
_LATE = ("body", "snapshot")
# Who is lost while the first snapshots are taken, before step 0, ends the job.
_NOT_FIRST = "snapshot"
# Of losses without a return: slot 0 first.
_WITHOUT_RETURN = ("body", "optimizer", "forward")
_MOST_LOSSES = 2
LEAST_STEPS = 5
# Of a kind with several runs, the second has the name and "-2".
_DEALT_OTHERWISE, _LOSSES, _RETURNS = _KINDS = ("dealt-otherwise", "losses", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of the job that the undisturbed run tells.

    ``width``: replicas at launch; ``parts``: workers of one replica; ``exact``: bits are promised;
    ``returns``: a lost worker comes back; ``rotates``: micro-batches are dealt whole.
    """

    width: int
    parts: int
    exact: bool
    returns: bool
    rotates: bool = True

    @property
    def workers(self) -> int:
        """Workers at launch."""
        return self.width * self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedRun:
    """One run and what disturbs it; with ``kills``, its comparison follows from ``Facts.exact``."""

    name: str
    title: str
    rotates: bool = False
    kills: tuple[Kill, ...] = ()
    changes: tuple[Change, ...] = ()


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigurationError for a name that no run has in any job."""
    kinds = {re.sub(r"-\d+$", "", name): None for name in names}
    check_words(kinds, _KINDS, "--run: unknown name")


def disturbed_runs(facts: Facts, *, steps: int) -> tuple[DisturbedRun, ...]:
    """The runs after the undisturbed one; none where there is one replica only."""
    if facts.width < 2:
        return ()
    runs = []
    if facts.exact and facts.rotates:
        title = "dealt otherwise"
        runs.append(DisturbedRun(name=_DEALT_OTHERWISE, title=title, rotates=True))
    if facts.returns:
        runs += [next(_losses(facts, _WITHOUT_RETURN)), *_with_returns(facts, steps)]
    else:
        others = (phase for phase in PHASES if phase not in _WITHOUT_RETURN)
        runs += _losses(facts, (*_WITHOUT_RETURN, *others))
    return tuple(runs)


def _losses(facts: Facts, phases: Sequence[str]) -> Iterator[DisturbedRun]:
    """Kills without a return, slot 0 first; in one run as many as the job survives for certain."""
    at_most = 1 if facts.parts > 1 else min(facts.width - 1, _MOST_LOSSES)
    # A planned departure beside another interrupts a step as well, as no planned one may.
    every = 1 if facts.exact else 2
    slots = (0, *range(facts.workers - 1, 0, -1))
    for number, first in enumerate(range(0, len(phases), at_most), start=1):
        kills = tuple(
            Kill(slot=slot, step=1 + order * every, phase=phase)
            for order, (slot, phase) in enumerate(
                zip(slots, phases[first : first + at_most], strict=False)
            )
        )
        name = _LOSSES if number == 1 else f"{_LOSSES}-{number}"
        yield DisturbedRun(name=name, title=name.replace("-", ", "), kills=kills)


def _with_returns(facts: Facts, steps: int) -> Iterator[DisturbedRun]:
    """A kill in every phase, each with a return; as many runs as that takes."""
    at_once = 2 if facts.exact and facts.parts == 1 and facts.width > 2 else 1
    left, number = list(PHASES), 0
    while left:
        number += 1
        run = _returning(facts, left, steps, at_once=at_once, first=number - 1)
        left = [phase for phase in left if phase not in {kill.phase for kill in run.kills}]
        name, title = _RETURNS, "losses and returns"
        if number > 1:
            name, title = f"{name}-{number}", f"{title}, {number}"
        yield replace(run, name=name, title=title)


def _returning(
    facts: Facts, phases: Sequence[str], steps: int, *, at_once: int, first: int
) -> DisturbedRun:
    """Fit as many of the phases as one run takes; ``first``: the slot that is killed first."""
    left, step = list(phases), 0
    kills: list[Kill] = []
    changes: list[Change] = []
    while fitting := [
        phase for phase in left if step + _absence(phase) < steps and (step or phase != _NOT_FIRST)
    ]:
        together = fitting[:at_once]
        back = step + max(map(_absence, together))
        for phase in together:
            slot = (first + len(kills)) % facts.workers
            incarnation = sum(kill.slot == slot for kill in kills)
            kills.append(Kill(slot=slot, incarnation=incarnation, step=step, phase=phase))
            changes.append(Change(slot=slot, step=back, arrives=True))
            left.remove(phase)
        step = back
    return DisturbedRun(name="", title="", kills=tuple(kills), changes=tuple(changes))


def _absence(phase: str) -> int:
    """Steps from that of the kill to the first that the lost worker makes again."""
    return 2 if phase in _LATE else 1
