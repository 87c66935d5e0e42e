"""The messages that the agents of a job send to each other, and the orders of each to its node."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elaswave_plugin.core.agreement.view import Arrival, FailureEvent, MembershipView, WorkerId
from elaswave_plugin.core.codec import WireMessage, from_json, shortened
from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.core.table import objects_of, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The content of a commit: the facts by slot, and every sealed record that a worker has.

    The agents hand it on as text: at many workers, to take it apart and put it together again
    on the way to each trainer is most of the work of a commit.
    """

    facts: dict[int, WorkerFacts]
    inventory: list[SealedShard]


def pack_payload(
    facts: Mapping[int, Mapping[str, Any]], inventory: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a `Payload`, of parts that are not read on the way.

    Both are tables: what many workers have alike is in it once.
    """
    packed = {
        "slots": shortened(list(facts)),
        "facts": table_of(list(facts.values())),
        "inventory": table_of(inventory),
    }
    return json.dumps(packed, separators=(",", ":"))


def unpack_payload(text: str) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Return the parts that were packed, as JSON; raises ValueError for anything else."""
    packed: _Packed = from_json(_Packed, json.loads(text))
    facts = objects_of(packed.facts)
    if len(facts) != len(packed.slots):
        raise ValueError(f"the facts of {len(facts)} workers for {len(packed.slots)} slots")
    return dict(zip(packed.slots, facts, strict=True)), objects_of(packed.inventory)


def read_payload(text: str) -> Payload:
    """Return what was packed; raises ValueError where it is something else."""
    facts, inventory = unpack_payload(text)
    return Payload(
        facts={slot: from_json(WorkerFacts, one) for slot, one in facts.items()},
        inventory=[from_json(SealedShard, one) for one in inventory],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A payload as it travels."""

    slots: tuple[int, ...]
    facts: Mapping[str, Any]
    inventory: Mapping[str, Any]


Facts = dict[str, Any]
Inventory = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Ballot:
    """The right to propose one view: ordered by term, then by its leader, then by epoch.

    A term is one leadership, and a leader elected later has a higher one; `leader`: its node;
    `epoch`: that of the view. `life` tells the agents apart that the node has had: no two of them
    ever use the same ballot.
    """

    term: int
    leader: int
    life: int = 0
    epoch: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.leader}"

    @classmethod
    def first(cls) -> "Ballot":
        """Return the ballot by which the first node of the launch leads, without any promise."""
        return cls(term=0, leader=0, epoch=0)

    def is_in_term_of(self, other: "Ballot") -> bool:
        """Return whether both belong to one term of leadership."""
        return replace(self, epoch=other.epoch) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A view under a ballot; `lost` are nodes whose agents are shut out for good.

    `lineage` are earlier views, oldest first, that some member may not have applied yet.
    `boundary`: it waits until the trainers are between two steps. Only such a one lets workers in,
    since a newcomer can take part in a whole step and in nothing less.
    """

    ballot: Ballot
    view: MembershipView
    lost: tuple[int, ...] = ()
    lineage: tuple[MembershipView, ...] = ()
    boundary: bool = False

    def __str__(self) -> str:
        lost = f" lost={list(self.lost)}" if self.lost else ""
        lineage = f" after={[view.epoch for view in self.lineage]}" if self.lineage else ""
        when = " between steps" if self.boundary else ""
        return f"{self.ballot}{lost}{lineage}{when} {self.view}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(WireMessage):
    """A would-be leader asks for the promise to refuse lower ballots.

    `epoch`: that of the newest view that it knows to be committed; `accepted`: the highest ballot
    of which it has accepted the proposal.
    """

    ballot: Ballot
    epoch: int
    lost: tuple[int, ...]
    accepted: Ballot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise(WireMessage):
    """The answer to `Prepare`: what this agent knows and has accepted, what its trainers were told.

    `newer`, `accepted`: what the asker does not know of; `asked_epoch`: the highest for which its
    trainers were asked to stop; `lost`: nodes; `news` is what it had told the leader before.
    """

    ballot: Ballot
    applied_epoch: int
    asked_epoch: int
    newer: tuple[MembershipView, ...]
    accepted: Proposal | None
    lost: tuple[int, ...]
    news: "tuple[News, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(WireMessage):
    """The leader's plan for the next view."""

    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A trainer's answer to a proposal: it has stopped; no facts: there is no trainer.

    `entering`: it has not been in any view yet.
    """

    facts: Facts | None
    entering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced(WireMessage):
    """An agent accepted the proposal, and its trainers have stopped: their answers by slot.

    `inventory`: what is sealed on its node.
    """

    ballot: Ballot
    answers: dict[int, Answer]
    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(WireMessage):
    """The sender's trainers have begun `step` at most, and wait to be told where all stop.

    `stands`: one of them stands before `step`, which it cannot begin any more.
    """

    ballot: Ballot
    step: int
    stands: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBefore(WireMessage):
    """All trainers stop before `step`, which none of them has begun."""

    ballot: Ballot
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(WireMessage):
    """The view is decided; `payload` is for the trainers (see `core/layout/worker_facts.py`)."""

    proposal: Proposal
    payload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(WireMessage):
    """A refusal: a higher ballot was promised to another leader."""

    promised: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(WireMessage):
    """The exception that ended a script, of class `error`, raised at `where`, as "train.py:12".

    `when`: where in the training, as "in step 3", which the script's agent adds; `traceback`:
    "" where it was shown already.
    """

    error: str
    message: str
    where: str
    when: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.error}: {self.message}{place}" if self.message else f"{self.error}{place}"

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for workers that fail alike; their messages may name a rank or a sample."""
        return self.error, self.where, self.when


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(WireMessage):
    """An agent witnessed the end of one of its trainers; exit_code is None after a signal.

    `raised`: what ended its script, where it has told.
    """

    failure: FailureEvent
    exit_code: int | None
    raised: Raised | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuse(WireMessage):
    """An agent lost sight of another one."""

    node: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Severed(WireMessage):
    """A link between two trainers broke in this epoch while one of them needed it.

    Usually the other one has died, and news of that follows at once. Otherwise both live: the same
    workers get a new view, dial its links again, and redo the step.
    """

    epoch: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan(WireMessage):
    """A worker wants a view after this epoch, between two steps, for a wish that its facts name."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSeal(WireMessage):
    """A trainer has sealed its first snapshot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSealed(WireMessage):
    """Every trainer has sealed its first snapshot: from now on a loss can be survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(WireMessage):
    """A trainer has finished its work; exit_code is set once it has exited.

    `when`: where in the training, as in `Raised`.
    """

    slot: int
    exit_code: int | None
    when: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached(WireMessage):
    """A trainer trains (else: has ended) without having joined the job.

    `missing`: what the script lacks.
    """

    slot: int
    trains: bool
    missing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(WireMessage):
    """A trainer, a new incarnation, is built and waits to be let in."""

    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(WireMessage):
    """A trainer has to go, and does so between two steps.

    `saves_last`: where all have to go, it writes a last checkpoint with the others, and ends.
    `asked`: by a user who wants the job to go on; void once it is time to leave where the job
    would end, with nothing saved.
    """

    worker: WorkerId
    evidence: str
    saves_last: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays(WireMessage):
    """The leader's answer to a request: the notice is void, and is not repeated."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(WireMessage):
    """A trainer needs nothing any more that was sealed before this epoch."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts(WireMessage):
    """The start of a trainer in the place of a lost one, with a higher incarnation."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacate(WireMessage):
    """The sender has no more to do with a slot of its node: another one may take it."""

    slot: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(WireMessage):
    """The leader gives empty slots to a node, whose agent is at `address` (`join_rule`)."""

    ballot: Ballot
    node: int
    address: str
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(WireMessage):
    """The knowledge that a later agent needs to take part; `workers`: its first trainers.

    `addresses`: of the agents that live, by node; `incarnations`: the newest known of each slot
    that had more than one; `lost`: nodes, with evidence; `empty`: slots that no node has, likewise;
    `history`: the first two views, and those that some may not know; `unused_node`: a number that
    no node has had.
    """

    ballot: Ballot
    workers: tuple[WorkerId, ...]
    nodes: tuple[int, ...]
    addresses: dict[int, str]
    history: tuple[MembershipView, ...]
    accepted: Proposal | None
    lost: dict[int, str]
    empty: dict[int, str]
    incarnations: dict[int, int]
    unused_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(WireMessage):
    """The job is over, or cannot go on; `part`: for the followers of one without a majority."""

    reason: str
    exit_code: int
    part: bool = False


News = (
    Report
    | Severed
    | Replan
    | FirstSeal
    | AllSealed
    | Done
    | Detached
    | Ready
    | Notice
    | Settled
    | Starts
)

Message = (
    Prepare
    | Promise
    | Propose
    | Quiesced
    | Begun
    | StopBefore
    | Committed
    | Refuse
    | Report
    | Accuse
    | Severed
    | Replan
    | FirstSeal
    | AllSealed
    | Done
    | Detached
    | Ready
    | Notice
    | Stays
    | Settled
    | Starts
    | Vacate
    | Admit
    | Welcome
    | Stop
)


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


Order = Ring | Deliver | Dismiss | Fence | Seated | Vacated | Over
"""The part of the effects that is about the trainers of the node."""
Effect = Send | Disconnect | Note | Order
