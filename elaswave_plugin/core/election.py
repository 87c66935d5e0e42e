"""What a new leader builds on, from the promises that elected it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elaswave_plugin.core.agreement_messages import Promise, Proposal
from elaswave_plugin.core.membership import MembershipView


class Outcome(NamedTuple):
    """The epoch that every trainer has applied; whether to propose at once; views to adopt."""

    behind_epoch: int
    must_propose: bool
    views: tuple[MembershipView, ...]


def outcome_of(
    promises: Sequence[Promise],
    *,
    applied_epoch: int,
    accepted: Proposal | None,
    committed: MembershipView,
) -> Outcome:
    """From all promises, and what the new leader has applied, accepted and knows as committed.

    The highest view that anybody accepted may have been committed somewhere, so it is adopted.
    """
    behind_epoch = min([applied_epoch, *(promise.applied_epoch for promise in promises)])
    told = [promise.newer for promise in promises if promise.newer]
    most = max(told, key=lambda newer: newer[-1].epoch, default=())
    views = tuple(view for view in most if view.epoch > committed.epoch)
    proposals = [promise.accepted for promise in promises if promise.accepted is not None]
    if accepted is not None:
        proposals.append(accepted)
    last = max(proposals, key=lambda proposal: proposal.ballot, default=None)
    newest = views[-1] if views else committed
    must_propose = newest.epoch == 0
    if last is not None:
        must_propose = must_propose or last.ballot.epoch > behind_epoch
        for view in (*last.lineage, last.view):
            if view.epoch > newest.epoch:
                views, newest = (*views, view), view
    return Outcome(behind_epoch, must_propose, views)
