"""The detection of a hanging worker, by how long it stands still and which workers wait for it.

A worker without progress is guilty if others wait for it and it waits for none itself. If
workers wait for each other in a circle, the one furthest behind is guilty. A circle of different
operations never ends, so the shortest limit applies in it, whatever the phase.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_plugin.core.agreement.limits import FACTOR, STOPPED_LIMIT_S, UNKNOWN_LIMIT_S

# Values of `Sample.waits_for` that are not a slot.
NOBODY = -1
COMMIT = -2
"""The commit of a proposed view, and so every worker that has not stopped for it yet."""
OUTSIDE = -3
"""Something that no trainer does: an agent, a file."""

RECOVERY_S, RECOVERY_PART = 0.4, 0.2
"""Seconds of a limit that are left for the recovery, and the largest part of it.

The others shall be at work again when the limit is over, except for the step that is redone.
"""
_CAME_LATER = (
    "; it came later, and its script does something else than theirs: one that counts its steps"
    " itself has not seen those before it; count those that the job has made (what job.train"
    " yields; in DeepSpeed engine.global_steps), keep the count by elaswave_plugin.keep, or set"
    " respawn to 0"
)
_NOT_ALIKE = (
    "; the scripts do different things: every worker has to make the same calls, run and evaluate"
    " too, and not rank 0 alone"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading of a trainer's progress page, `stalled_s` seconds after the page last changed.

    `waited_s`: further seconds in which it waited for a processor, and could not go on.
    `operations`: how many operations with others it has begun. `waits_for`: the slot without which
    its operation cannot go on, or one of NOBODY, COMMIT, OUTSIDE. `waits_in`: which
    operation that is, alike on all members of its group. `stopped_s`: for how long a signal has
    stopped it; None: it has not. `floor_s`: the shortest limit that a phase may have. `announced`:
    the phase is work between steps, as a save. `entered`: native communicators, and how many calls
    on each it has entered, in one order on all members. `in_kernel_s`: for how long it was found
    asleep in the kernel where no signal wakes it; None: it is not. `in_kernel_limit_s`: the seconds
    of that after which it is given up all the same; None: it is not. `unheard`: the slots whose
    machines have answered nothing to its machine for some time.
    """

    slot: int
    incarnation: int
    epoch: int
    step: int
    phase: str
    operations: int
    stalled_s: float
    limit_s: float
    waits_for: int = NOBODY
    stopped_s: float | None = None
    waited_s: float = 0.0
    waits_in: int = 0
    floor_s: float = UNKNOWN_LIMIT_S
    announced: bool = False
    entered: tuple[tuple[int, int], ...] = ()
    in_kernel_s: float | None = None
    in_kernel_limit_s: float | None = None
    unheard: tuple[int, ...] = ()

    @property
    def may_stall_s(self) -> float:
        """The seconds that it may stand still: its limit less the time for a recovery."""
        return _without_recovery(self.limit_s)

    @property
    def may_stall_in_circle_s(self) -> float:
        """The same where it waits in another operation than those that wait for it."""
        return min(self.may_stall_s, _without_recovery(self.floor_s))

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        return self.stopped_s is not None

    @property
    def is_held(self) -> bool:
        """True if the kernel holds it, on a file system or a device, for longer than it may."""
        return self.in_kernel_s is not None and self.in_kernel_s >= self.may_stall_s

    @property
    def is_late(self) -> bool:
        """True if it has stood still, or was stopped, or held, for longer than it may."""
        if self.in_kernel_limit_s is not None and self.in_kernel_s is not None:
            return self.in_kernel_s >= self.in_kernel_limit_s
        return self.stalled_s >= self.may_stall_s or (self.stopped_s or 0.0) >= STOPPED_LIMIT_S

    @property
    def is_apart(self) -> bool:
        """True if it waits for a worker whose machine it does not hear."""
        return self.waits_for in self.unheard

    @property
    def is_late_in_circle(self) -> bool:
        """The same where it waits in another operation than those that wait for it."""
        return self.is_late or self.stalled_s >= self.may_stall_in_circle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The workers that wait for one worker, sorted; `in_circle`: it waits for one of them itself.

    `differs`: it waits in another operation than one of them, so none of these ever ends;
    `by_script`: some in the circle do work between steps that the script asks of them alone;
    `apart`: two in the circle do not hear each other, so it never ends either.
    """

    slots: tuple[int, ...] = ()
    in_circle: bool = False
    differs: bool = False
    by_script: bool = False
    apart: bool = False

    def __str__(self) -> str:
        if not self.slots:
            return "no worker waits for it"
        one = len(self.slots) == 1
        text = f"worker{'' if one else 's'} {', '.join(map(str, self.slots))}"
        text += f" wait{'s' if one else ''} for it"
        if self.apart:
            return f"{text} in a circle, in which it and another one do not hear each other"
        if self.differs:
            return f"{text} in another operation than the one in which it waits for them"
        return f"{text} in a circle, in which it is the furthest behind" if self.in_circle else text


def with_native_waits(samples: Iterable[Sample], *, still_s: float) -> dict[int, Sample]:
    """Return the workers that stand still, by slot; of native calls too it is known who is awaited.

    `samples` are of all workers that have native communicators, those at work among them, and of
    those that stand still, for ``still_s`` or longer. One that has entered more calls than another
    on a communicator of both waits for that one, or will: for the one that is furthest behind. A
    stopped one holds up its last call as well.
    """
    known = list(samples)
    last: dict[int, tuple[int, Sample]] = {}
    for one in known:
        for communicator, calls in one.entered:
            reached = calls - one.is_stopped
            if communicator not in last or reached < last[communicator][0]:
                last[communicator] = reached, one
    return {
        one.slot: replace(one, waits_for=_awaited_natively(one, last))
        if one.waits_for == NOBODY
        else one
        for one in known
        if one.stalled_s >= still_s
    }


def _awaited_natively(sample: Sample, last: Mapping[int, tuple[int, Sample]]) -> int:
    """Return the slot that is furthest behind, of the last ones on each of its communicators."""
    reached = ((calls, *last[communicator]) for communicator, calls in sample.entered)
    behind = [one for calls, least, one in reached if least < calls and one is not sample]
    return min(behind, key=lambda one: _how_far(one, differs=False)).slot if behind else NOBODY


def who_waits(members: Iterable[int], samples: Mapping[int, Sample]) -> dict[int, Waiting]:
    """Find the workers at the end of each chain of waiting, by slot.

    `samples` are of the members that stand still; the others are at work. A stopped worker does
    not count as one that waits: stopping all of a job does not make it hang, and of whatever it
    waited, it goes on no more.
    """
    waiters: dict[int, set[int]] = {}
    circles: dict[int, list[Sample]] = {}
    for slot, sample in samples.items():
        if sample.is_stopped or sample.waits_for in (NOBODY, OUTSIDE):
            continue
        if sample.waits_for == COMMIT:
            ends = [one for one in members if not _awaits_commit(samples.get(one))]
        else:
            end, circle = _end_of_chain(slot, samples)
            ends = [] if end is None else [end]
            if end is not None and circle:
                circles[end] = circle
        for end in ends:
            waiters.setdefault(end, set()).add(slot)
    return {
        end: Waiting(
            slots=tuple(sorted(slots - {end})),
            in_circle=end in circles,
            differs=_differ(circles.get(end, ())),
            by_script=any(one.announced for one in circles.get(end, ())),
            apart=any(one.is_apart for one in circles.get(end, ())),
        )
        for end, slots in waiters.items()
        if slots - {end}
    }


def verdict(sample: Sample, waiting: Waiting) -> str | None:
    """Say why this worker has to go, as evidence; None if it may stay."""
    waits = sample.waits_for != NOBODY and not waiting.in_circle and not sample.is_stopped
    never_ends = waiting.differs or waiting.apart
    is_late = sample.is_late_in_circle if never_ends else sample.is_late
    if not is_late or not waiting.slots or waits:
        return None
    stopped = ""
    if sample.stopped_s is not None:
        stopped = f", stopped by a signal for {sample.stopped_s:.1f} s"
    if sample.in_kernel_s is not None:
        stopped = f", in a call of the kernel's that no signal ends for {sample.in_kernel_s:.1f} s"
    if sample.waited_s >= 0.1:
        stopped += f", and {sample.waited_s:.1f} s in which it waited for a processor"
    why = (_CAME_LATER if sample.incarnation else _NOT_ALIKE) if waiting.differs else ""
    return (
        f"no progress for {sample.stalled_s:.1f} s in {sample.phase} of step {sample.step}"
        f"{stopped} (limit {limit_of(sample, waiting):.3g} s with a recovery); {waiting}{why}"
    )


def limit_of(sample: Sample, waiting: Waiting) -> float:
    """Return the seconds after which others go on without this worker, recovery included."""
    if sample.in_kernel_s is not None and sample.in_kernel_limit_s is not None:
        return sample.in_kernel_limit_s
    never_ends = waiting.differs or waiting.apart
    limit_s = min(sample.limit_s, sample.floor_s) if never_ends else sample.limit_s
    return min(limit_s, STOPPED_LIMIT_S) if sample.is_stopped else limit_s


def _awaits_commit(sample: Sample | None) -> bool:
    return sample is not None and sample.waits_for == COMMIT


def _without_recovery(limit_s: float) -> float:
    return limit_s - min(RECOVERY_S, RECOVERY_PART * limit_s)


def _differ(circle: Sequence[Sample]) -> bool:
    """Return whether none of them ever goes on, since their operations differ.

    A stopped one might do anything once it goes on; of those that do not hear each other the
    network is at fault.
    """
    if any(one.is_apart for one in circle):
        return False
    return len({one.waits_in for one in circle}) > 1 and not any(one.is_stopped for one in circle)


def _end_of_chain(slot: int, samples: Mapping[int, Sample]) -> tuple[int | None, list[Sample]]:
    """Return the end of a chain of waiting (None: no trainer), and the circle if it is one."""
    path: list[int] = []
    here = slot
    while here not in path:
        path.append(here)
        sample = samples.get(here)
        if sample is None or sample.waits_for == NOBODY or sample.is_stopped:
            return here, []
        if sample.waits_for < 0:
            return None, []
        here = sample.waits_for
    circle = [samples[one] for one in path[path.index(here) :]]
    differs, apart = _differ(circle), [one for one in circle if one.is_apart]
    if not all(one.is_late_in_circle if differs or apart else one.is_late for one in circle):
        return None, []
    if apart:
        # Always the same end of what is cut: the other one keeps all its workers.
        return max(max(one.slot, one.waits_for) for one in apart), circle
    # All of them stand still, so every observer sees the same numbers.
    return min(circle, key=lambda one: _how_far(one, differs=differs)).slot, circle


def _how_far(one: Sample, *, differs: bool) -> tuple[int, ...]:
    """Return a sort key of progress; if operations differ, a late worker is furthest behind."""
    came = -one.incarnation if differs else 0
    return one.epoch, one.step, came, one.operations, one.slot


FIRST_S = 10.0
"""Seconds before the first report; each further one comes after three times the last wait."""
AGAIN = 3.0
STEADY_S = 2.0
"""Seconds for which the same workers must be late: when all go on, some seem to wait longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWait:
    """A wait of all other workers for the slots ``late``; the last of them has waited ``waited_s``.

    ``usual_s``: seconds that the phase of the late ones usually takes; 0 if not known.
    """

    late: tuple[int, ...]
    waited_s: float
    usual_s: float = 0.0


def all_wait(members: Iterable[int], samples: Mapping[int, Sample]) -> AllWait | None:
    """Find the workers for which all others wait; None if another one is at work.

    Reported before anything counts as a hang.

    >>> waits = Sample(slot=1, incarnation=0, epoch=1, step=0, phase="between steps", operations=1,
    ...                stalled_s=11.0, limit_s=600.0, waits_for=0)
    >>> found = all_wait((0, 1), {1: waits})
    >>> found.late, found.waited_s
    ((0,), 11.0)

    `samples` are of the members that stand still; the others have just made progress, or have not
    attached yet. A phase of known duration may take that long first.
    """
    members = set(members)
    waiting = who_waits(sorted(members), samples)
    late = tuple(sorted(waiting))
    waiters = {slot for one in waiting.values() for slot in one.slots} - {*late}
    if not waiters or waiters | {*late} != members:
        return None
    waited_s = min(samples[slot].stalled_s for slot in waiters)
    limits = [samples[slot].limit_s for slot in late if slot in samples]
    usual_s = max((limit / FACTOR for limit in limits if limit < UNKNOWN_LIMIT_S), default=0.0)
    return AllWait(late=late, waited_s=waited_s, usual_s=usual_s)


class Said:
    """The memory of what was reported, so that it is repeated at longer and longer intervals."""

    def __init__(self) -> None:
        self._late: tuple[int, ...] = ()
        self._due_s = 0.0
        self._since_s: dict[int, float] = {}

    def is_due(self, found: AllWait | None, now_s: float) -> bool:
        """Return whether to report now: others are late, or three times as long as last time."""
        late = () if found is None else found.late
        self._since_s = {slot: self._since_s.get(slot, now_s) for slot in late}
        if found is None or found.waited_s < max(FIRST_S, found.usual_s):
            return False
        if max(self._since_s.values()) > now_s - STEADY_S:
            return False
        if late == self._late and found.waited_s < self._due_s:
            return False
        self._late, self._due_s = late, AGAIN * found.waited_s
        return True
