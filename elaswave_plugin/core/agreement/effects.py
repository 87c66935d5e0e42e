"""The orders of the agreement to its own supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.core.agreement.messages import Ballot, Committed, Message
from elaswave_plugin.core.agreement.view import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to the supervisor of slot `to`."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A proposal is open: ask the own trainer to quiesce, then call `quiesced` with this ballot.

    `boundary`: stop between two steps: ask which step it has begun, and call `begun`; with
    `before_step`, stop before that step.
    """

    ballot: Ballot
    reason: str
    boundary: bool = False
    before_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand the commit to the own trainer; `skipped` are views it has to apply first."""

    committed: Committed
    skipped: tuple[MembershipView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Let the own trainer go: a view without it is committed, as it had asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Kill the own trainer, for the reason given as evidence."""

    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Close the link to the supervisor of `slot`; `kill` it first if it runs on this node."""

    slot: int
    kill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Use the link that the newly admitted supervisor at `address` has opened.

    If there is no such link, the newcomer is lost.
    """

    slot: int
    node: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """End: stop the own trainer, tell every peer, and exit."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An entry for the event log and for observers."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Send | Ring | Deliver | Dismiss | Fence | Disconnect | Connect | Over | Note
