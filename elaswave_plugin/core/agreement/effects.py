"""The orders of the agreement to its own agent, which passes some of them on to its trainers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.core.agreement.messages import Ballot, Committed, Message
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId
from elaswave_plugin.core.codec import WireMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to the agent of node `to`."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring(WireMessage):
    """A proposal is open: each own trainer is to quiesce within `within_s` seconds, for the reason.

    The agent calls `quiesced` with this ballot then. `boundary`: a trainer stops between two steps:
    it says which step it has begun, and the agent calls `begun`; with `before_step`, it stops
    before that step.
    """

    ballot: Ballot
    reason: str
    within_s: float
    boundary: bool = False
    before_step: int | None = None

    @property
    def is_urgent(self) -> bool:
        """True if it is known where the trainers stop."""
        return not self.boundary or self.before_step is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(WireMessage):
    """The own trainers in a commit are told of it; `skipped` are views they have to apply first."""

    committed: Committed
    skipped: tuple[MembershipView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Let an own trainer go: a view without it is committed, as it had asked."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Kill an own trainer, for the reason given as evidence."""

    slot: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """Start the first trainer of an own slot that the leader has given to this node."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacated:
    """Nothing more is to be done with an own slot: its trainer has left, and all is settled."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Close the link to the agent of a node."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """End: stop the own trainers, tell every peer, and exit."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An entry for the event log and for observers."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Send | Ring | Deliver | Dismiss | Fence | Seated | Vacated | Disconnect | Over | Note
