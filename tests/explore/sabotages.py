"""Takes a rule of the agreement away: what the explorer has to see."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from elaswave_plugin.core.agreement import candidate, leader
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import Ballot
from elaswave_plugin.core.agreement.quorum import Nodes


def _without_majorities() -> Any:
    return mock.patch.object(Nodes, "minority_in", return_value=None)


def _without_what_was_accepted() -> Any:
    """A new leader forgets proposals that may have been committed somewhere."""
    whole = candidate.outcome_of

    def forgetful(promises: Any, **known: Any) -> Any:
        return whole(promises, **known)._replace(adopted=(), missed=())

    return mock.patch.object(candidate, "outcome_of", forgetful)


def _without_all_answers() -> Any:
    """A view is committed once its members have answered, whoever else lives."""
    whole = Agreement._commit_when_answered

    def early(self: Agreement, proposal: Any, now_s: float) -> None:
        with mock.patch.object(Nodes, "living", return_value=sorted({*proposal.view.nodes})):
            whole(self, proposal, now_s)

    return mock.patch.object(Agreement, "_commit_when_answered", early)


def _without_lineage() -> Any:
    """A proposal does not say on which views it builds."""
    whole = leader.Proposal

    def alone(**parts: Any) -> Any:
        return whole(**{**parts, "lineage": ()})

    return mock.patch.object(leader, "Proposal", alone)


def _without_votes_of_the_last_life() -> Any:
    """An agent's next life knows nothing of what its node has promised and accepted."""
    whole = Agreement.record

    def forgetful(self: Agreement) -> Any:
        return replace(whole(self), promised=Ballot.first(), accepted=None)

    return mock.patch.object(Agreement, "record", forgetful)


SABOTAGES: Mapping[str, Callable[[], Any]] = {
    "majorities": _without_majorities,
    "what was accepted": _without_what_was_accepted,
    "all answers": _without_all_answers,
    "lineage": _without_lineage,
    "votes of the last life": _without_votes_of_the_last_life,
}
