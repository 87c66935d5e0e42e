"""The record that outlives an agent: its votes, and what its next life begins with (pure).

An agent sends nothing before its vote is stored, and the next life begins with what is stored: so
no two lives of a node's agent ever vote against each other. What the trainers are doing is not in
it: they say it again to the next life.
"""

from dataclasses import dataclass

from elaswave_plugin.core.agreement.messages import Ballot, Committed, Notice, Proposal
from elaswave_plugin.core.agreement.reporter import Seat
from elaswave_plugin.core.agreement.view import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A node's part in the agreement, as far as its next agent has to know it.

    Ballots below `promised` do not count; `accepted`: the proposal of the highest ballot; `last`:
    the newest commit, whose views the node's trainers may not have been told of; `known_epoch` as
    in `Acceptor`; `seats`: the own slots; `history` ends with the newest view that is certainly
    committed; `notices`: of own trainers that are to leave. The rest is as in `Welcome`.
    """

    promised: Ballot
    accepted: Proposal | None
    last: Committed | None
    history: tuple[MembershipView, ...]
    known_epoch: int
    started: bool
    seats: dict[int, Seat]
    nodes: tuple[int, ...]
    addresses: dict[int, str]
    lost: dict[int, str]
    empty: dict[int, str]
    incarnations: dict[int, int]
    unused_node: int
    notices: tuple[Notice, ...] = ()
