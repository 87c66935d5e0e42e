"""The start of a new leader, from the promises that elected it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elaswave_plugin.core.agreement.messages import Promise, Proposal
from elaswave_plugin.core.agreement.view import MembershipView


class Outcome(NamedTuple):
    """The state with which the new leader begins.

    `common_epoch`: every trainer has applied it; `must_propose`: at once; `missed`: views that are
    certainly committed; `adopted`: later views that may be, and `lost` the slots shut out with
    them; `asked_epoch`: the highest for which any trainer was asked to stop.
    """

    common_epoch: int
    must_propose: bool
    missed: tuple[MembershipView, ...]
    adopted: tuple[MembershipView, ...]
    lost: tuple[int, ...]
    asked_epoch: int


def outcome_of(
    promises: Sequence[Promise],
    *,
    applied_epoch: int,
    asked_epoch: int,
    accepted: Proposal | None,
    committed: MembershipView,
) -> Outcome:
    """Combine all promises and what the new leader itself would promise.

    `committed`: the newest view that it knows to be committed.

    The proposal of the highest ballot may have been committed somewhere, so its view is adopted. No
    other one can have been: the leader with that ballot was told of it by a node of each majority.
    """
    common_epoch = min([applied_epoch, *(promise.applied_epoch for promise in promises)])
    asked_epoch = max([asked_epoch, *(promise.asked_epoch for promise in promises)])
    told = [promise.newer for promise in promises if promise.newer]
    most = max(told, key=lambda newer: newer[-1].epoch, default=())
    missed = tuple(view for view in most if view.epoch > committed.epoch)
    proposals = [promise.accepted for promise in promises if promise.accepted is not None]
    if accepted is not None:
        proposals.append(accepted)
    last = max(proposals, key=lambda proposal: proposal.ballot, default=None)
    newest = missed[-1] if missed else committed
    must_propose = newest.epoch == 0 or asked_epoch > common_epoch
    adopted: tuple[MembershipView, ...] = ()
    if last is not None:
        must_propose = must_propose or last.ballot.epoch > common_epoch
        adopted = tuple(view for view in (*last.lineage, last.view) if view.epoch > newest.epoch)
    lost = last.lost if last is not None and adopted else ()
    return Outcome(common_epoch, must_propose, missed, adopted, lost, asked_epoch)
