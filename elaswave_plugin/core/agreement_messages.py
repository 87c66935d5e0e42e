"""What the supervisors say to each other, and what the agreement asks its own supervisor to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.core.membership import Arrival, FailureEvent, MembershipView, WorkerId

Facts = dict[str, Any]
Inventory = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """The right to propose one view: ordered by epoch, then by the slot of the leader."""

    epoch: int
    leader: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.leader}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A view under a ballot; `lost` are slots whose supervisors are shut out for good.

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
class Prepare:
    """A would-be leader asks for the promise to refuse lower ballots."""

    ballot: Ballot
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer to `Prepare`: what this member knows, has accepted, and has told its trainer.

    `news` is what it had told the leader before.
    """

    ballot: Ballot
    applied_epoch: int
    history: tuple[MembershipView, ...]
    accepted: Proposal | None
    lost: tuple[int, ...]
    news: tuple[News, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """The leader's plan for the next view."""

    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced:
    """A member accepted the proposal and its trainer (if it has one: facts) has stopped.

    `entering`: that trainer has not been in any view yet.
    """

    ballot: Ballot
    facts: Facts | None
    inventory: Inventory
    entering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The sender's trainer has begun `step`, and begins no other before it knows where all stop."""

    ballot: Ballot
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBefore:
    """All trainers stop before `step`, which none of them has begun."""

    ballot: Ballot
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The view is decided; `payload` is for the trainers (see `pack_payload`)."""

    proposal: Proposal
    payload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """A higher ballot was promised to somebody else."""

    promised: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A supervisor witnessed the end of its own trainer; exit_code is None after a signal."""

    failure: FailureEvent
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuse:
    """A supervisor lost sight of another one."""

    slot: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Severed:
    """A link between two trainers broke in this epoch while one of them needed it."""

    epoch: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """In this epoch one of the workers got a wish, which its facts name in the next view."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSeal:
    """The sender's trainer has sealed its first snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSealed:
    """Every trainer has sealed its first snapshot: from now on a loss can be survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The sender's trainer has finished its work; exit_code is set once it has exited."""

    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The sender's trainer, a new incarnation, is built and waits to be let in."""

    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The sender's trainer has to go, and does so between two steps.

    `saves_last`: where all have to go, it writes a last checkpoint with the others, and ends.
    `asked`: by somebody who wants the job to go on; void where it would end, with nothing saved.
    """

    worker: WorkerId
    evidence: str
    saves_last: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """The leader to who asked for it: a notice is void, and nobody is to be told of it again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The sender's trainer needs nothing any more that was sealed before this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """A supervisor starts a trainer in the place of a lost one; whoever comes later is newer."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The leader lets the supervisor at `address` take the place of a lost one (`admission`)."""

    ballot: Ballot
    worker: WorkerId
    node: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a supervisor that comes later has to know to take part; `worker`: its first trainer.

    `incarnations`: the newest known of each slot that had more than one; `lost`: with evidence.
    """

    ballot: Ballot
    worker: WorkerId
    nodes: tuple[int, ...]
    history: tuple[MembershipView, ...]
    accepted: Proposal | None
    lost: dict[int, str]
    incarnations: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The job is over."""

    reason: str
    exit_code: int


News = Report | Severed | Replan | FirstSeal | AllSealed | Done | Ready | Notice | Settled | Starts

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
    | Ready
    | Notice
    | Stays
    | Settled
    | Starts
    | Admit
    | Welcome
    | Stop
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to the supervisor of slot `to`."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A proposal is open: ask the own trainer to quiesce, then call `quiesced` with this ballot.

    `boundary`: where it is between two steps: ask which one it has begun, and call `begun`; with
    `before_step`, before that one.
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
    """A view without the own trainer is committed, as it had asked for: it may go."""


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

    Without one, it is lost.
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
    """Something for the event log and for whoever watches."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Send | Ring | Deliver | Dismiss | Fence | Disconnect | Connect | Over | Note


def to_wire(message: Message) -> dict[str, Any]:
    """The message as a dict that JSON can carry."""
    match message:
        case Prepare():
            return {"m": "prepare", "b": _ballot(message.ballot), "lost": list(message.lost)}
        case Promise():
            return {
                "m": "promise",
                "b": _ballot(message.ballot),
                "applied_epoch": message.applied_epoch,
                "history": [view.to_json() for view in message.history],
                "accepted": message.accepted and _proposal(message.accepted),
                "lost": list(message.lost),
                "news": [to_wire(one) for one in message.news],
            }
        case Propose():
            return {"m": "propose", "p": _proposal(message.proposal)}
        case Quiesced():
            return {
                "m": "quiesced",
                "b": _ballot(message.ballot),
                "facts": message.facts,
                "inventory": message.inventory,
                "entering": message.entering,
            }
        case Begun():
            return {"m": "begun", "b": _ballot(message.ballot), "step": message.step}
        case StopBefore():
            return {"m": "stop_before", "b": _ballot(message.ballot), "step": message.step}
        case Committed():
            proposal = _proposal(message.proposal)
            return {"m": "committed", "p": proposal, "payload": message.payload}
        case Refuse():
            return {"m": "refuse", "b": _ballot(message.promised)}
        case Report():
            failure = message.failure.to_json()
            return {"m": "report", "failure": failure, "exit_code": message.exit_code}
        case Accuse():
            return {"m": "accuse", "slot": message.slot, "evidence": message.evidence}
        case Severed():
            return {"m": "severed", "epoch": message.epoch, "evidence": message.evidence}
        case Replan():
            return {"m": "replan", "epoch": message.epoch, "reason": message.reason}
        case FirstSeal():
            return {"m": "first_seal"}
        case AllSealed():
            return {"m": "all_sealed"}
        case Done():
            return {"m": "done", "exit_code": message.exit_code}
        case Ready():
            arrival = message.arrival
            return {"m": "ready", "worker": arrival.worker.to_json(), "node": arrival.node}
        case Notice():
            return {
                "m": "notice",
                "worker": message.worker.to_json(),
                "evidence": message.evidence,
                "saves_last": message.saves_last,
                "asked": message.asked,
            }
        case Stays():
            return {"m": "stays", "worker": message.worker.to_json()}
        case Settled():
            return {"m": "settled", "epoch": message.epoch}
        case Starts() | Admit() | Welcome():
            return _newcomer_to_wire(message)
        case Stop():
            return {"m": "stop", "reason": message.reason, "exit_code": message.exit_code}


def from_wire(record: Mapping[str, Any]) -> Message:
    """The message that `to_wire` described; raises ValueError for an unknown one."""
    match record["m"]:
        case "prepare":
            return Prepare(ballot=Ballot(*record["b"]), lost=tuple(record["lost"]))
        case "promise":
            return Promise(
                ballot=Ballot(*record["b"]),
                applied_epoch=record["applied_epoch"],
                history=tuple(map(MembershipView.from_json, record["history"])),
                accepted=record["accepted"] and _read_proposal(record["accepted"]),
                lost=tuple(record["lost"]),
                news=tuple(map(_read_news, record["news"])),
            )
        case "propose":
            return Propose(proposal=_read_proposal(record["p"]))
        case "quiesced":
            return Quiesced(
                ballot=Ballot(*record["b"]),
                facts=record["facts"],
                inventory=record["inventory"],
                entering=record["entering"],
            )
        case "begun":
            return Begun(ballot=Ballot(*record["b"]), step=record["step"])
        case "stop_before":
            return StopBefore(ballot=Ballot(*record["b"]), step=record["step"])
        case "committed":
            return Committed(
                proposal=_read_proposal(record["p"]),
                payload=record["payload"],
            )
        case "refuse":
            return Refuse(promised=Ballot(*record["b"]))
        case "report":
            failure = FailureEvent.from_json(record["failure"])
            return Report(failure=failure, exit_code=record["exit_code"])
        case "accuse":
            return Accuse(slot=record["slot"], evidence=record["evidence"])
        case "severed":
            return Severed(epoch=record["epoch"], evidence=record["evidence"])
        case "replan":
            return Replan(epoch=record["epoch"], reason=record["reason"])
        case "first_seal":
            return FirstSeal()
        case "all_sealed":
            return AllSealed()
        case "done":
            return Done(exit_code=record["exit_code"])
        case "ready":
            worker = WorkerId.from_json(record["worker"])
            return Ready(arrival=Arrival(worker=worker, node=record["node"]))
        case "notice":
            worker = WorkerId.from_json(record["worker"])
            return Notice(
                worker=worker,
                evidence=record["evidence"],
                saves_last=record["saves_last"],
                asked=record["asked"],
            )
        case "stays":
            return Stays(worker=WorkerId.from_json(record["worker"]))
        case "settled":
            return Settled(epoch=record["epoch"])
        case "starts" | "admit" | "welcome":
            return _newcomer_from_wire(record)
        case "stop":
            return Stop(reason=record["reason"], exit_code=record["exit_code"])
        case other:
            raise ValueError(f"unknown message {other!r} between supervisors")


def _newcomer_to_wire(message: Starts | Admit | Welcome) -> dict[str, Any]:
    """What is said about workers that come later."""
    match message:
        case Starts():
            return {"m": "starts", "worker": message.worker.to_json()}
        case Admit():
            return {
                "m": "admit",
                "b": _ballot(message.ballot),
                "worker": message.worker.to_json(),
                "node": message.node,
                "address": message.address,
            }
        case Welcome():
            return {
                "m": "welcome",
                "b": _ballot(message.ballot),
                "worker": message.worker.to_json(),
                "nodes": list(message.nodes),
                "history": [view.to_json() for view in message.history],
                "accepted": message.accepted and _proposal(message.accepted),
                "lost": list(message.lost.items()),
                "incarnations": list(message.incarnations.items()),
            }


def _newcomer_from_wire(record: Mapping[str, Any]) -> Starts | Admit | Welcome:
    match record["m"]:
        case "starts":
            return Starts(worker=WorkerId.from_json(record["worker"]))
        case "admit":
            worker = WorkerId.from_json(record["worker"])
            return Admit(
                ballot=Ballot(*record["b"]),
                worker=worker,
                node=record["node"],
                address=record["address"],
            )
        case _:
            return Welcome(
                ballot=Ballot(*record["b"]),
                worker=WorkerId.from_json(record["worker"]),
                nodes=tuple(record["nodes"]),
                history=tuple(map(MembershipView.from_json, record["history"])),
                accepted=record["accepted"] and _read_proposal(record["accepted"]),
                lost=dict(record["lost"]),
                incarnations=dict(record["incarnations"]),
            )


def pack_payload(facts: Mapping[int, Facts], inventory: Inventory) -> str:
    """Facts by slot, and every sealed record that a living supervisor has, as one text.

    The supervisors hand it on unread: at many workers, to take it apart and put it together again
    on the way to each trainer is most of the work of a commit.
    """
    return json.dumps({"facts": list(facts.items()), "inventory": inventory})


def unpack_payload(payload: str) -> tuple[dict[int, Facts], Inventory]:
    """What `pack_payload` packed."""
    record = json.loads(payload)
    return dict(record["facts"]), record["inventory"]


def _read_news(record: Mapping[str, Any]) -> News:
    message = from_wire(record)
    if not isinstance(message, News):
        raise ValueError(f"{record['m']!r} among the news of a promise")
    return message


def _ballot(ballot: Ballot) -> list[int]:
    return [ballot.epoch, ballot.leader]


def _proposal(proposal: Proposal) -> dict[str, Any]:
    return {
        "b": _ballot(proposal.ballot),
        "view": proposal.view.to_json(),
        "lost": list(proposal.lost),
        "lineage": [view.to_json() for view in proposal.lineage],
        "boundary": proposal.boundary,
    }


def _read_proposal(record: Mapping[str, Any]) -> Proposal:
    return Proposal(
        ballot=Ballot(*record["b"]),
        view=MembershipView.from_json(record["view"]),
        lost=tuple(record["lost"]),
        lineage=tuple(map(MembershipView.from_json, record["lineage"])),
        boundary=record["boundary"],
    )
