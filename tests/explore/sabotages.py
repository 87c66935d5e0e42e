"""Takes a rule of the agreement away: what the explorer has to see."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from elaswave_plugin.core.agreement import leader
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.quorum import Supervisors


def _without_majorities() -> Any:
    return mock.patch.object(Supervisors, "minority_in", return_value=None)


def _without_what_was_accepted() -> Any:
    """A new leader forgets proposals that may have been committed somewhere."""
    whole = leader.outcome_of

    def forgetful(promises: Any, **known: Any) -> Any:
        return whole(promises, **known)._replace(adopted=(), missed=())

    return mock.patch.object(leader, "outcome_of", forgetful)


def _without_all_answers() -> Any:
    """A view is committed once its members have answered, whoever else lives."""
    whole = Agreement._commit_when_answered

    def early(self: Agreement, proposal: Any, now_s: float) -> None:
        with mock.patch.object(Supervisors, "living", return_value=list(proposal.view.ranks)):
            whole(self, proposal, now_s)

    return mock.patch.object(Agreement, "_commit_when_answered", early)


def _without_lineage() -> Any:
    """A proposal does not say on which views it builds."""
    whole = leader.Proposal

    def alone(**parts: Any) -> Any:
        return whole(**{**parts, "lineage": ()})

    return mock.patch.object(leader, "Proposal", alone)


def _without_losses_of_others() -> Any:
    """Losses that a leader declares are not taken over."""
    return mock.patch.object(Agreement, "_shut_out", return_value=False)


SABOTAGES: Mapping[str, Callable[[], Any]] = {
    "majorities": _without_majorities,
    "what was accepted": _without_what_was_accepted,
    "all answers": _without_all_answers,
    "lineage": _without_lineage,
    "losses of others": _without_losses_of_others,
}
