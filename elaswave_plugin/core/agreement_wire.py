"""The messages of the supervisors as JSON, and the payload that they hand on unread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from types import NoneType
from typing import Any

from elaswave_plugin.core.agreement_messages import (
    Accuse,
    Admit,
    AllSealed,
    Ballot,
    Begun,
    Committed,
    Detached,
    Done,
    Facts,
    FirstSeal,
    Inventory,
    Message,
    News,
    Notice,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Quiesced,
    Raised,
    Ready,
    Refuse,
    Replan,
    Report,
    Settled,
    Severed,
    Starts,
    Stays,
    Stop,
    StopBefore,
    Welcome,
)
from elaswave_plugin.core.membership import Arrival, FailureEvent, MembershipView, WorkerId
from elaswave_plugin.core.node_memory import NodeMemory

# What JSON may carry in a field of such a type.
_SCALARS = (("int", int), ("str", str), ("bool", bool), ("int | None", (int, NoneType)))


class UnreadableMessageError(ValueError):
    """A message of a kind that nobody here knows, or with a flaw: another version said it."""

    def __init__(self, kind: object, flaw: str = ", unknown here") -> None:
        super().__init__(f"message {kind!r}{flaw}")
        self.kind, self.flaw = kind, flaw


@contextmanager
def reading(kind: object) -> Iterator[None]:
    """Inside, a message is taken apart: raises UnreadableMessageError where that fails."""
    try:
        yield
    except UnreadableMessageError:
        raise
    except KeyError as error:
        raise UnreadableMessageError(kind, f" without {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UnreadableMessageError(kind, f" with something else in it ({error})") from error


def to_wire(message: Message) -> dict[str, Any]:
    """The message as a dict that JSON can carry."""
    match message:
        case Prepare():
            told = {"epoch": message.epoch, "lost": list(message.lost)}
            return {"m": "prepare", "b": _ballot(message.ballot), **told}
        case Promise():
            return {
                "m": "promise",
                "b": _ballot(message.ballot),
                "applied_epoch": message.applied_epoch,
                "asked_epoch": message.asked_epoch,
                "newer": [view.to_json() for view in message.newer],
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
            return _report(message)
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
        case Detached():
            return {"m": "detached", **asdict(message)}
        case Ready():
            arrival = message.arrival
            return {"m": "ready", "worker": arrival.worker.to_json(), "node": arrival.node}
        case Notice():
            return {"m": "notice", **asdict(message), "worker": message.worker.to_json()}
        case Stays():
            return {"m": "stays", "worker": message.worker.to_json()}
        case Settled():
            return {"m": "settled", "epoch": message.epoch}
        case Starts() | Admit() | Welcome():
            return _newcomer_to_wire(message)
        case Stop():
            return {"m": "stop", **asdict(message)}


def _report(message: Report) -> dict[str, Any]:
    failure, raised = message.failure.to_json(), message.raised and asdict(message.raised)
    return {"m": "report", "failure": failure, "exit_code": message.exit_code, "raised": raised}


def from_wire(record: Mapping[str, Any]) -> Message:
    """The message that `to_wire` described; raises UnreadableMessageError for any other."""
    kind = record.get("m")
    with reading(kind):
        message = _read(record)
    for field in fields(message):
        value = getattr(message, field.name)
        if any(field.type == name and not isinstance(value, one) for name, one in _SCALARS):
            raise UnreadableMessageError(kind, f" with {field.name} {value!r:.60}")
    return message


def _read(record: Mapping[str, Any]) -> Message:
    match record["m"]:
        case "prepare":
            epoch, lost = record["epoch"], tuple(record["lost"])
            return Prepare(ballot=_read_ballot(record["b"]), epoch=epoch, lost=lost)
        case "promise":
            return _read_promise(record)
        case "propose":
            return Propose(proposal=_read_proposal(record["p"]))
        case "quiesced":
            return Quiesced(
                ballot=_read_ballot(record["b"]),
                facts=record["facts"],
                inventory=record["inventory"],
                entering=record["entering"],
            )
        case "begun":
            return Begun(ballot=_read_ballot(record["b"]), step=record["step"])
        case "stop_before":
            return StopBefore(ballot=_read_ballot(record["b"]), step=record["step"])
        case "committed":
            return Committed(
                proposal=_read_proposal(record["p"]),
                payload=record["payload"],
            )
        case "refuse":
            return Refuse(promised=_read_ballot(record["b"]))
        case "report":
            failure = FailureEvent.from_json(record["failure"])
            raised = record["raised"] and Raised(**record["raised"])
            return Report(failure=failure, exit_code=record["exit_code"], raised=raised)
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
        case "detached":
            return Detached(trains=record["trains"], missing=record["missing"])
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
            code, part = record["exit_code"], record["part"]
            return Stop(reason=record["reason"], exit_code=code, part=part)
        case other:
            raise UnreadableMessageError(other)


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
                "unused_node": message.unused_node,
            }


def _read_promise(record: Mapping[str, Any]) -> Promise:
    return Promise(
        ballot=_read_ballot(record["b"]),
        applied_epoch=record["applied_epoch"],
        asked_epoch=record["asked_epoch"],
        newer=tuple(map(MembershipView.from_json, record["newer"])),
        accepted=record["accepted"] and _read_proposal(record["accepted"]),
        lost=tuple(record["lost"]),
        news=tuple(map(_read_news, record["news"])),
    )


def _newcomer_from_wire(record: Mapping[str, Any]) -> Starts | Admit | Welcome:
    match record["m"]:
        case "starts":
            return Starts(worker=WorkerId.from_json(record["worker"]))
        case "admit":
            worker = WorkerId.from_json(record["worker"])
            return Admit(
                ballot=_read_ballot(record["b"]),
                worker=worker,
                node=record["node"],
                address=record["address"],
            )
        case _:
            return Welcome(
                ballot=_read_ballot(record["b"]),
                worker=WorkerId.from_json(record["worker"]),
                nodes=tuple(record["nodes"]),
                history=tuple(map(MembershipView.from_json, record["history"])),
                accepted=record["accepted"] and _read_proposal(record["accepted"]),
                lost=dict(record["lost"]),
                incarnations=dict(record["incarnations"]),
                unused_node=record["unused_node"],
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


def memory_to_wire(memory: NodeMemory) -> dict[str, Any]:
    """A node's memory as a dict that JSON can carry."""
    return {
        "promised": _ballot(memory.promised),
        "accepted": memory.accepted and _proposal(memory.accepted),
        "before": [view.to_json() for view in memory.before],
    }


def memory_from_wire(record: Mapping[str, Any]) -> NodeMemory:
    """The memory that `memory_to_wire` described."""
    return NodeMemory(
        promised=_read_ballot(record["promised"]),
        accepted=record["accepted"] and _read_proposal(record["accepted"]),
        before=tuple(map(MembershipView.from_json, record["before"])),
    )


def _ballot(ballot: Ballot) -> list[int]:
    return [ballot.term, ballot.leader, ballot.life, ballot.epoch]


def _read_ballot(record: list[int]) -> Ballot:
    term, leader, life, epoch = map(int, record)
    return Ballot(term=term, leader=leader, life=life, epoch=epoch)


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
        ballot=_read_ballot(record["b"]),
        view=MembershipView.from_json(record["view"]),
        lost=tuple(record["lost"]),
        lineage=tuple(map(MembershipView.from_json, record["lineage"])),
        boundary=record["boundary"],
    )
