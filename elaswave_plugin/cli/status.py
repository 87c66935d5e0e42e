"""Asks a running job: for its status, one document of all answers, or for a change.

A change is made between two steps: a worker leaves, or layers move.
"""

import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_plugin.agent.trainer_session import RECENT_VIEWS
from elaswave_plugin.core.agreement.hang import (
    COMMIT,
    NOBODY,
    OUTSIDE,
    Sample,
    Waiting,
    verdict,
    who_waits,
)
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import Address, read_addresses
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Secret, named_secrets, secret_at

Record = dict[str, Any]
MOST_AT_ONCE = 64
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Contacts:
    """Agents of a running job, and its secret, which they want to be proved."""

    addresses: tuple[Address, ...]
    secrets: tuple[Secret, ...]

    def secret_at(self, address: str, timeout_s: float) -> Secret:
        """Return which of the secrets is that of the job; raises OSError."""
        return secret_at(address, self.secrets, timeout_s)

    def shows(self, but: int = UNKNOWN) -> str:
        """Return the command that shows the job, by an agent that is not of node ``but``."""
        stays = [one for one in self.addresses if one.node != but or but == UNKNOWN]
        return f"`elaswave status --connect {(stays or self.addresses)[0].address}`"


def find_job(directory: Path | None, connect: str | None) -> Contacts:
    """Agents of the job in a run directory, or the one at host:port (node -1: unknown).

    Raises ConfigurationError.
    """
    if (directory is None) is (connect is None):
        given = "both are" if directory else "neither is"
        raise ConfigurationError(
            f"wanted a run directory or --connect HOST:PORT, and {given} given"
        )
    if connect is not None:
        one = Address(node=UNKNOWN, pid=UNKNOWN, address=_checked(connect))
        return Contacts((one,), tuple(named_secrets(os.environ, None)))
    assert directory is not None
    return addresses_in(directory)


def ask_job(contacts: Contacts, timeout_s: float) -> Record:
    """The status of the job, as `merge` tells it; each agent has `timeout_s` to answer.

    Those that are not among the contacts are named by the others.
    Raises ConfigurationError where nobody answers.
    """
    if not 0 < timeout_s < float("inf"):
        raise ConfigurationError(f"--timeout-s is {timeout_s:g}, wanted more than 0 seconds")
    known = contacts.addresses
    answers, silent = _ask_all(contacts, known, timeout_s)
    if not answers:
        one, why = next(iter(silent.items()))
        raise ConfigurationError(
            f"no agent answers within {timeout_s:g} s ({one}: {why}): the job is over, or"
            " cannot be reached from this machine"
        )
    asked = {answer["node"] for answer in answers} | {one.node for one in known}
    others, more_silent = _ask_all(contacts, _unasked(answers, asked), timeout_s)
    why_silent = {one.node: why for one, why in {**silent, **more_silent}.items()}
    return merge([*answers, *others], silent=why_silent, now_s=time.time())


def ask_worker(
    contacts: Contacts, status: Record, slot: int, asked: Record, timeout_s: float
) -> Record:
    """The answer of one worker's agent; `status`: the job's, which names it.

    Raises ConfigurationError where it is silent.
    """
    (address,) = [one["address"] for one in status["workers"] if one["slot"] == slot]
    try:
        asked = {**asked, "slot": slot}
        return request(address, asked, timeout_s, contacts.secret_at(address, timeout_s))
    except OSError as error:
        raise ConfigurationError(f"the agent of worker {slot} does not answer: {error}") from error


def addresses_in(directory: Path) -> Contacts:
    """The job in a run directory; raises ConfigurationError where there is none."""
    if not directory.is_dir():
        raise ConfigurationError(
            f"{directory} is no directory; give the run directory of a job (--elaswave-dir)"
        )
    try:
        known = read_addresses(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the addresses of the job in {directory} cannot be read: {error}"
        ) from error
    if not known:
        raise ConfigurationError(
            f"no job is running in {directory}: there is no agent-*.json; give the run"
            " directory of a running job, or --connect HOST:PORT"
        )
    return Contacts(tuple(known), tuple(named_secrets(os.environ, directory)))


def addresses_of(status: Record) -> list[Address]:
    """The agents that a status document knows of."""
    return [
        Address(node=one["node"], pid=one["pid"] or UNKNOWN, address=one["address"])
        for one in status["nodes"]
    ]


def merge(answers: Sequence[Record], *, silent: dict[int, str], now_s: float) -> Record:
    """One document of all answers; `silent`: why an agent did not answer, by node.

    The newest view that any knows holds. Keys: asked_s, view, proposal (or None), layout (or
    None), nodes (their agents), workers (one of each slot), unheard (pairs of nodes that do not
    hear each other), standbys (idle places, by node), vacant (slots of the reserve in which no
    worker has been), views (recent, oldest first).
    """
    first = _best(answers)
    told = {one["slot"]: (one, answer) for answer in answers for one in answer["workers"]}
    lost = {one["slot"]: one["evidence"] for one in first["lost"]}
    snapshots = _newest_snapshots(answers)
    hangs = _hangs(told.values(), first["view"]["ranks"])
    slow = {s: why for one, _ in told.values() if one["trainer_pid"] for s, why in one["slow"]}
    nodes = _nodes(first, answers, silent)
    agents = {one["node"]: one for one in nodes}
    workers = []
    for slot, node in enumerate(first["nodes"]):
        if slot in first["vacant"]:
            continue
        answer, _ = told.get(slot, (None, None))
        worker = _worker(slot, node, agents.get(node), answer, first["view"])
        worker["snapshot"] = snapshots.get(slot)
        if worker["step"] is None and answer is not None and slot in snapshots:
            worker["step"] = snapshots[slot]["step"]
        if slot in lost:
            worker["phase"], worker["suspicion"] = "gone", lost[slot]
        elif answer is None:
            why = silent.get(node, "it was not asked")
            worker["suspicion"] = f"the agent of node {node} does not answer: {why}"
        elif answer["exited"] is not None and answer["phase"] == "exited":
            worker["suspicion"] = answer["exited"]
        elif slot in hangs:
            worker["suspicion"] = hangs[slot]
        elif slot in slow and worker["suspicion"] is None:
            worker["suspicion"] = slow[slot]
        workers.append(worker)
    every = [one for one, _ in told.values()]
    return {
        "asked_s": now_s,
        "view": first["view"],
        "proposal": _open_proposal(every, first["view"]["epoch"]),
        "layout": _layout(first, told.values()),
        "nodes": nodes,
        "workers": workers,
        "unheard": [
            {"node": answer["node"], "peer": one["node"], "since_s": one["since_s"]}
            for answer in answers
            for one in answer["unheard"]
        ],
        "standbys": [
            {"node": one["node"], "places": one["standby_places"]}
            for one in sorted(answers, key=lambda answer: int(answer["node"]))
            if one["standby_places"]
        ],
        "vacant": first["vacant"],
        "views": _views([*answers, *every]),
    }


def _nodes(first: Record, answers: Sequence[Record], silent: dict[int, str]) -> list[Record]:
    """List the agents: of each node host, process, life (how many agents it had before), slots."""
    by_node = {answer["node"]: answer for answer in answers}
    found = []
    for name, address in sorted(first["addresses"].items(), key=lambda one: int(one[0])):
        node = int(name)
        answer = by_node.get(node)
        found.append(
            {
                "node": node,
                "host": answer and answer["host"],
                "pid": answer and answer["pid"],
                "life": answer and answer["life"],
                "address": address,
                "slots": [slot for slot, of in enumerate(first["nodes"]) if of == node],
                "leads": node == first["leader"],
                "silent": None if answer is not None else silent.get(node, "it was not asked"),
            }
        )
    return found


def _checked(connect: str) -> str:
    host, colon, port = connect.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigurationError(
            f"--connect is {connect!r}, wanted HOST:PORT of an agent, as 10.0.0.1:29501"
        )
    return f"{host.removeprefix('[').removesuffix(']')}:{port}"


def _ask_all(
    contacts: Contacts, addresses: Sequence[Address], timeout_s: float
) -> tuple[list[Record], dict[Address, str]]:
    """All answers, and why there is none of the others."""

    def ask(one: Address) -> Record | str:
        try:
            secret = contacts.secret_at(one.address, timeout_s)
            answer = request(one.address, {"t": "status"}, timeout_s, secret)
        except OSError as error:
            return error.strerror or str(error)
        # The port may belong to somebody else by now.
        if answer.get("t") != "status" or one.pid not in (UNKNOWN, answer["pid"]):
            return "another process answers there"
        return answer

    answers, silent = [], {}
    with ThreadPoolExecutor(max(1, min(MOST_AT_ONCE, len(addresses)))) as pool:
        for one, result in zip(addresses, pool.map(ask, addresses), strict=True):
            if isinstance(result, str):
                silent[one] = result
            else:
                answers.append(result)
    return answers, silent


def _best(answers: Sequence[Record]) -> Record:
    """Return the answer whose view and losses hold: of the newest view, then of the most losses.

    Then of the lowest node: the leader, which has the evidence; the others may only have its word.
    """
    return max(answers, key=lambda a: (a["view"]["epoch"], len(a["lost"]), -a["node"]))


def _unasked(answers: Sequence[Record], asked: Iterable[int]) -> list[Address]:
    """List the agents that the best answer names and that were not asked."""
    addresses = {int(node): one for node, one in _best(answers)["addresses"].items()}
    without = set(asked)
    return [
        Address(node=node, pid=UNKNOWN, address=one)
        for node, one in addresses.items()
        if node not in without
    ]


def _worker(
    slot: int, node: int, agent: Record | None, answer: Record | None, view: Record
) -> Record:
    rank = view["ranks"].index(slot) if slot in view["ranks"] else None
    worker: Record = {
        "slot": slot,
        "incarnation": 0 if rank is None else view["incarnations"][rank],
        "rank": rank,
        "node": node,
        "agent_pid": agent and agent["pid"],
        "trainer_pid": None,
        "address": agent and agent["address"],
        "phase": "unknown",
        "step": None,
        "waits_for": None,
        "stalled_s": None,
        "suspicion": None,
    }
    if answer is not None:
        worker["phase"] = answer["phase"]
        worker["incarnation"] = answer["incarnation"]
        worker["trainer_pid"] = answer["trainer_pid"] or None
        if answer["progress"] is not None:
            _add_progress(worker, from_json(Sample, answer["progress"]))
        if answer["late_in"] is not None:
            worker["waits_for"], worker["stalled_s"] = answer["late_in"], None
        proposal = _open_proposal([answer], view["epoch"])
        if proposal is not None and answer["proposal"]["late"]:
            worker["suspicion"] = (
                f"has not answered the proposal of view {proposal['epoch']}"
                f" for {proposal['open_s']:.1f} s"
            )
    return worker


def _open_proposal(answers: Sequence[Record], epoch: int) -> Record | None:
    """The newest proposal; not one that became the view of `epoch`, where one was not told so."""
    found = [a["proposal"] for a in answers if a["proposal"] and a["proposal"]["epoch"] > epoch]
    newest = max(found, key=lambda one: int(one["epoch"]), default=None)
    return newest and {key: newest[key] for key in ("epoch", "reason", "open_s")}


def _add_progress(worker: Record, sample: Sample) -> None:
    """Add how far the trainer is, as it says itself."""
    if worker["phase"] == "training":
        worker["phase"] = sample.phase
    elif worker["phase"] == "stopping":
        worker["phase"] = f"stopping ({sample.phase})"
    worker["step"] = sample.step
    worker["stalled_s"] = sample.stalled_s
    others = {NOBODY: None, COMMIT: "commit", OUTSIDE: "outside"}
    worker["waits_for"] = others.get(sample.waits_for, sample.waits_for)


def _hangs(told: Iterable[tuple[Record, Record]], ranks: Sequence[int]) -> dict[int, str]:
    """Return the evidence against workers that stand still, as the agents would judge it."""
    given = [from_json(Sample, one["progress"]) for one, _ in told if one["progress"] is not None]
    samples = {sample.slot: sample for sample in given if sample.slot in ranks}
    waiting = who_waits(ranks, samples)
    found = {}
    for slot, sample in samples.items():
        evidence = verdict(sample, waiting.get(slot, Waiting()))
        if evidence is not None:
            found[slot] = evidence
        elif sample.is_stopped:
            found[slot] = "stopped by a signal"
        elif sample.is_late and sample.waits_for == NOBODY:
            limit = f"(limit {sample.limit_s:.3g} s with a recovery)"
            stands = f"no progress for {sample.stalled_s:.1f} s in {sample.phase}"
            found[slot] = f"{stands} {limit}; no worker waits for it"
    return found


def _newest_snapshots(answers: Iterable[Record]) -> dict[int, Record]:
    """Return each owner's newest sealed snapshot, and the newest that each other slot holds.

    A copy is a moment younger or older than its original, since agents are asked in turn.
    """
    newest: dict[tuple[int, int], Record] = {}
    for answer in answers:
        for record in answer["snapshots"]:
            key = record["owner"], record["holder"]
            if key not in newest or _age(record) > _age(newest[key]):
                newest[key] = record
    found: dict[int, Record] = {}
    for owner in {owner for owner, _ in newest}:
        own = max((one for (slot, _), one in newest.items() if slot == owner), key=_age)
        found[owner] = {
            "step": own["step"],
            "epoch": own["epoch"],
            "bytes": own["length"],
            "held_by": [
                {"slot": holder, "step": one["step"], "epoch": one["epoch"]}
                for (slot, holder), one in sorted(newest.items())
                if slot == owner and holder != owner
            ],
        }
    return found


def _age(record: Record) -> tuple[int, int]:
    """Rises with every seal, although a roll-back lowers the step."""
    return int(record["epoch"]), int(record["step"])


def _layout(first: Record, told: Iterable[tuple[Record, Record]]) -> Record | None:
    """That of a worker that has applied the newest view."""
    epoch = first["view"]["epoch"]
    for one, answer in told:
        layout: Record | None = one["layout"]
        if layout is not None and answer["view"]["epoch"] == epoch and one["trainer_pid"]:
            return layout
    return None


def _views(answers: Sequence[Record]) -> list[Record]:
    """Return recent views by epoch, each with the first moment at which an agent had it."""
    views: dict[int, Record] = {}
    for answer in answers:
        for view in answer["views"]:
            known = views.get(view["epoch"])
            if known is None or view["time_s"] < known["time_s"]:
                views[view["epoch"]] = view
    return [views[epoch] for epoch in sorted(views)][-RECENT_VIEWS:]


def slot_and_folder(words: Sequence[str], *, node: int | None) -> tuple[int, Path | None]:
    """Read ``SLOT [DIR]``, or ``[DIR]`` where a ``node`` is given in place of a slot, which is 0.

    Raises ConfigurationError.
    """
    if node is not None:
        if len(words) > 1:
            raise ConfigurationError(f"--node {node} and SLOT {words[0]} are given, wanted one")
        return 0, Path(words[0]) if words else None
    if not words or len(words) > 2 or not words[0].isdecimal():
        given = " ".join(words) or "nothing"
        raise ConfigurationError(f"wanted SLOT DIR, or --node N DIR, and {given} is given")
    return int(words[0]), Path(words[1]) if words[1:] else None


def drain_worker(contacts: Contacts, *, slot: int, reason: str, timeout_s: float) -> str:
    """Give the worker of `slot` notice; returns what will happen, in a sentence.

    `contacts`: some agents of the job. It does not wait for the worker to have left.
    Raises ConfigurationError where there is no such worker, or its agent refuses or is silent.
    """
    status = ask_job(contacts, timeout_s)
    live = status["view"]["ranks"]
    if slot not in live:
        raise ConfigurationError(
            f"worker {slot} is not in the job, wanted one of {' '.join(map(str, sorted(live)))}"
        )
    answer = ask_worker(contacts, status, slot, {"t": "drain", "reason": reason}, timeout_s)
    if answer["refused"] is not None:
        raise ConfigurationError(f"worker {slot} stays: {answer['refused']}")
    return f"worker {slot} leaves between two steps; {contacts.shows()} shows when it has"


def drain_node(contacts: Contacts, *, node: int, reason: str, timeout_s: float) -> str:
    """Give notice to all workers of a node; returns what will happen, in a sentence.

    As `drain_worker`, and raises ConfigurationError where some of them stay.
    """
    status = ask_job(contacts, timeout_s)
    live = {one["slot"]: one["node"] for one in status["workers"]}
    live = {slot: live[slot] for slot in sorted(status["view"]["ranks"])}
    if node not in live.values():
        known = " ".join(map(str, sorted(set(live.values()))))
        raise ConfigurationError(f"node {node} has no worker in the job, wanted one of {known}")
    asked = {"t": "drain", "reason": reason}
    answers = {
        slot: ask_worker(contacts, status, slot, asked, timeout_s)["refused"]
        for slot, of in live.items()
        if of == node
    }
    leave = ", ".join(str(slot) for slot, refused in answers.items() if refused is None)
    stay = [f"worker {slot} stays: {why}" for slot, why in answers.items() if why is not None]
    if stay:
        others = f"; of node {node} leave: {leave}" if leave else ""
        raise ConfigurationError("; ".join(stay) + others)
    return (
        f"workers {leave} of node {node} leave between two steps; {contacts.shows(but=node)} shows"
        " when they have"
    )


def migrate_layers(
    contacts: Contacts, *, layers: str, stage: int, reason: str, timeout_s: float
) -> str:
    """Ask for ``layers`` ("4" or "4-5") at ``stage``; returns what will happen, in a sentence.

    `contacts`: some agents of the job. It does not wait for the layers to have moved. They
    stay until the next loss or arrival, whose plan may move them again. Raises ConfigurationError
    where the job has no stages or its layers stay, for layers that cannot be there and for silence.
    """
    first, last = _parse(layers)
    status = ask_job(contacts, timeout_s)
    if status["layout"] is None:
        raise ConfigurationError("the job has no pipeline stages that layers could come to")
    layout = ParallelLayout.from_json(status["layout"])
    cuts = layout.with_layers_at(first, last, stage).cuts
    if cuts == layout.cuts:
        raise ConfigurationError(f"layers {layers} are at stage {stage} already")
    # One that holds a part of the model: a free worker may leave at any time.
    slot = min(slot for groups in layout.stages for group in groups for slot in group.slots)
    words = f"layers {layers} move to stage {stage}: {reason}"
    asked = {"t": "migrate", "cuts": cuts, "reason": words}
    answer = ask_worker(contacts, status, slot, asked, timeout_s)
    if answer["refused"] is not None:
        raise ConfigurationError(f"nothing moves: {answer['refused']}")
    return (
        f"layers {layers} move to stage {stage} between two steps; {contacts.shows()} shows when"
        " they have"
    )


def _parse(layers: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", layers)
    if found is None:
        raise ConfigurationError(f"--layers is {layers!r}, wanted a number or a range such as 4-5")
    return int(found[1]), int(found[2] or found[1])
