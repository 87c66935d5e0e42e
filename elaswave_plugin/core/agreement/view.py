"""The members of the job: workers, failure events, arrivals, views, and the step between views."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from elaswave_plugin.core.layout.reserve import vacant

# The stronger evidence first; each with its verb.
_KIND_ORDER = ("exit", "lost", "leave")
_KIND_WORDS = ("exited", "was lost", "left")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """A slot and the incarnation of the process in it."""

    slot: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.slot}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """An observation that a worker is gone; kind: exit, lost or leave; evidence: what was seen.

    `detected_at_s`: on the clock of the deciding agent; `incarnation`: of the failed process.
    """

    kind: str
    slot: int
    detected_at_s: float
    evidence: str
    incarnation: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KIND_ORDER:
            raise ValueError(f"failure kind is {self.kind!r}, must be one of {_KIND_ORDER}")

    def __str__(self) -> str:
        return f"{self.kind} of worker {self.worker}: {self.evidence}"

    @property
    def worker(self) -> WorkerId:
        """The worker that failed."""
        return WorkerId(slot=self.slot, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A new incarnation of a slot has built its model and waits to be let in."""

    worker: WorkerId
    node: int

    def __str__(self) -> str:
        return f"worker {self.worker.slot} (node {self.node}) joins as {self.worker}"


@dataclass(frozen=True, kw_only=True)
class MembershipView:
    """The live workers of one epoch: rank i is slot ranks[i], on node nodes[i]."""

    epoch: int
    ranks: tuple[int, ...]
    incarnations: tuple[int, ...]
    nodes: tuple[int, ...]
    reason: str

    def __post_init__(self) -> None:
        if not len(self.ranks) == len(self.incarnations) == len(self.nodes):
            raise ValueError(
                f"view {self.epoch} has {len(self.ranks)} ranks, "
                f"{len(self.incarnations)} incarnations and {len(self.nodes)} nodes"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"view {self.epoch} names a slot twice: {self.ranks}")

    def __str__(self) -> str:
        members = ",".join(
            f"{slot}.{incarnation}@{node}"
            for slot, incarnation, node in zip(
                self.ranks, self.incarnations, self.nodes, strict=True
            )
        )
        return f"view {self.epoch} [{members}]: {self.reason}"

    def __contains__(self, worker: WorkerId) -> bool:
        """Return whether a worker is a member; for one question, quicker than `workers`."""
        return self.by_slot.get(worker.slot) == worker.incarnation

    @cached_property
    def by_slot(self) -> dict[int, int]:
        """The incarnation in each slot that has a member."""
        return dict(zip(self.ranks, self.incarnations, strict=True))

    @cached_property
    def voters(self) -> frozenset[int]:
        """The nodes of its members, with one vote each."""
        return frozenset(self.nodes)

    @cached_property
    def workers(self) -> frozenset[WorkerId]:
        """Its members with their incarnations."""
        pairs = zip(self.ranks, self.incarnations, strict=True)
        return frozenset(WorkerId(slot=slot, incarnation=number) for slot, number in pairs)


def first_view(nodes: tuple[int, ...]) -> MembershipView:
    """The view before the first commit (epoch 0): slot i is rank i on node nodes[i].

    The slots of the reserve, which come last, are not in it.
    """
    width = len(nodes) - len(vacant(nodes))
    return MembershipView(
        epoch=0,
        ranks=tuple(range(width)),
        incarnations=(0,) * width,
        nodes=nodes[:width],
        reason="the job starts",
    )


def next_view(
    view: MembershipView, events: Iterable[FailureEvent], now_s: float
) -> MembershipView | None:
    """Return the view after `events`, or None if nothing changes.

    An event counts from its `detected_at_s` on, and only for the incarnation it names. The result
    depends on the set of events, not on their order. The ranks stay in slot order, so that
    contiguous shards keep most of what their workers have.
    """
    causes = _causes(view, events, now_s)
    if not causes:
        return None
    order = tuple(slot for slot in view.ranks if slot not in causes)
    position = {slot: rank for rank, slot in enumerate(view.ranks)}
    return MembershipView(
        epoch=view.epoch + 1,
        ranks=order,
        incarnations=tuple(view.incarnations[position[slot]] for slot in order),
        nodes=tuple(view.nodes[position[slot]] for slot in order),
        reason="; ".join(
            _sentence(causes[slot], view.nodes[position[slot]]) for slot in sorted(causes)
        ),
    )


def grown_view(view: MembershipView, arrivals: Iterable[Arrival]) -> MembershipView | None:
    """Return the view with the workers that wait to be let in, or None if there are none.

    Ranks are in slot order, so a job that is whole again has the ranks of its launch.
    """
    new = {one.worker.slot: one for one in arrivals if one.worker.slot not in view.ranks}
    if not new:
        return None
    members = dict(zip(view.ranks, zip(view.incarnations, view.nodes, strict=True), strict=True))
    members |= {slot: (one.worker.incarnation, one.node) for slot, one in new.items()}
    order = tuple(sorted(members))
    return MembershipView(
        epoch=view.epoch + 1,
        ranks=order,
        incarnations=tuple(members[slot][0] for slot in order),
        nodes=tuple(members[slot][1] for slot in order),
        reason="; ".join(str(new[slot]) for slot in sorted(new)),
    )


def departed(reason: str, slot: int) -> bool:
    """Return whether a worker left as asked, by the reason of the first view without it."""
    verb = _KIND_WORDS[_KIND_ORDER.index("leave")]
    return re.search(rf"\bworker {slot} \(node \d+\) {verb}: ", reason) is not None


def _causes(
    view: MembershipView, events: Iterable[FailureEvent], now_s: float
) -> dict[int, FailureEvent]:
    """Choose the event that counts for each lost slot: the strongest kind, then the earliest."""
    incarnations = dict(zip(view.ranks, view.incarnations, strict=True))
    causes: dict[int, FailureEvent] = {}
    for event in events:
        if incarnations.get(event.slot) != event.incarnation or event.detected_at_s > now_s:
            continue
        other = causes.get(event.slot)
        if other is None or _strength(event) < _strength(other):
            causes[event.slot] = event
    return causes


def _strength(event: FailureEvent) -> tuple[int, float, str]:
    return _KIND_ORDER.index(event.kind), event.detected_at_s, event.evidence


def _sentence(event: FailureEvent, node: int) -> str:
    word = _KIND_WORDS[_KIND_ORDER.index(event.kind)]
    return f"worker {event.slot} (node {node}) {word}: {event.evidence}"
