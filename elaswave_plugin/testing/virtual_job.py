"""Runs the real agreement of many agents over a virtual network, in virtual time."""

import json
import random
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import (
    Accuse,
    Admit,
    Ballot,
    Begun,
    Committed,
    Deliver,
    Disconnect,
    Dismiss,
    Done,
    Effect,
    Fence,
    Message,
    Note,
    Over,
    Prepare,
    Promise,
    Propose,
    Quiesced,
    Ready,
    Refuse,
    Report,
    Ring,
    Seated,
    Send,
    Starts,
    Stop,
    StopBefore,
    Vacated,
    Welcome,
    unpack_payload,
)
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import from_json, to_json
from elaswave_plugin.core.layout.reserve import NOWHERE


def describe(message: Message) -> str:
    """Write a message as one line."""
    match message:
        case Prepare():
            return f"prepare {message.ballot}, has {message.accepted} lost={list(message.lost)}"
        case Promise():
            accepted = message.accepted.ballot if message.accepted else "no other"
            newer = f", knows {[view.epoch for view in message.newer]}" if message.newer else ""
            applied = message.applied_epoch
            return f"promise {message.ballot}, applied {applied}, has {accepted}{newer}"
        case Propose():
            return f"propose {message.proposal}"
        case Quiesced():
            without = [slot for slot, one in message.answers.items() if one.facts is None]
            return f"quiesced {message.ballot}" + (f" without {without}" if without else "")
        case Committed():
            return f"committed {message.proposal.ballot}"
        case Refuse():
            return f"refuse, promised {message.promised}"
        case Report():
            return f"report {message.failure}"
        case Begun():
            return f"{'before' if message.stands else 'begun'} {message.step}, {message.ballot}"
        case StopBefore():
            return f"stop before step {message.step}, {message.ballot}"
        case Ready():
            return f"ready: {message.arrival}"
        case Starts():
            return f"starts {message.worker}"
        case Admit():
            workers = ", ".join(map(str, message.workers))
            return f"admit {workers} on node {message.node}, {message.ballot}"
        case Welcome():
            epochs = [view.epoch for view in message.history]
            lost = f" lost={sorted(message.lost)}" if message.lost else ""
            workers = f" {', '.join(map(str, message.workers))}" if message.workers else ""
            return f"welcome{workers}, {message.ballot}{lost}, after {epochs}"
        case Accuse():
            return f"accuse {message.node}: {message.evidence}"
        case Done():
            return f"done {message.slot}, exit code {message.exit_code}"
        case _:
            return type(message).__name__.lower()


def describe_note(note: Note) -> str | None:
    """Return the line for a reader of a note, of those that a golden script shows."""
    fields = note.fields
    match note.kind:
        case "quorum_lost":
            return f"no quorum, heard {fields['nodes_heard']}"
        case "told_to_stop":
            return f"says that {fields['by']} has stopped it"
        case "detached":
            return f"says that {fields['slot']} is detached"
        case "view_committed" if fields.get("again"):
            return f"tells again of view {fields['epoch']}"
        case "worker_raised":
            return f"shows what worker {fields['slot']} raised {fields['when']}"
        case _:
            return None


NEW_LINK = "new link"
"""The first thing on a link that is opened again, to the next life of an agent or the same one."""


class VirtualJob:
    """Agents without processes, whose messages are delivered in a fixed or a random order.

    ``nodes``: the node of each slot at the launch, `NOWHERE` for one of the reserve. What became of
    the job is here to be read:

    - ``alive``: the `Agreement` of each node whose agent lives; ``trainers``: who trains
    - ``decided``: every view by its epoch; ``commits``: the views that each trainer was told
    - ``ends``: how the job ended for a node; ``left``: who may leave, as it was told to
    - ``joined`` and ``entered``: newcomers that are let in, and those that take part
    - ``lines``: what happened, one line a message, view or end, unless ``verbose`` is off

    Messages pass through their wire form. Two trainers are never told different views of an epoch,
    and a newcomer meets the others between two steps: AssertionError if not.
    """

    def __init__(self, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.timeouts = timeouts
        self.settling: set[int] = set()
        self.width = len(nodes)
        self.launched = frozenset(slot for slot, node in enumerate(nodes) if node != NOWHERE)
        self.alive = {
            node: Agreement(node=node, nodes=nodes, timeouts=timeouts)
            for node in sorted({*nodes} - {NOWHERE})
        }
        # What each node has stored, for the next life of its agent.
        self.records: dict[int, Any] = {}
        self.lives = 0
        self.wires: dict[tuple[int, int], deque[Any]] = {}
        self.order: deque[tuple[int, int]] = deque()
        self.cut: set[tuple[int, int]] = set()
        # Those of them that nobody has acted on yet.
        self.broken: set[tuple[int, int]] = set()
        # Links that were opened again, of which the first end has not heard yet.
        self.stale: set[tuple[int, int]] = set()
        # Links on which nothing arrives for now.
        self.held: set[tuple[int, int]] = set()
        # Nodes that wait for the welcome of a leader, with that.
        self.asking: dict[int, int] = {}
        # The node of each slot, as far as anybody has one, and the trainers by slot: where each is
        # (step, whether it has begun it), who waits to be let in, who has stopped, for what.
        self.home = {slot: node for slot, node in enumerate(nodes) if node != NOWHERE}
        self.trainers = {*self.home}
        self.at: dict[int, tuple[int, bool]] = dict.fromkeys(self.home, (0, False))
        self.outside = {*self.home}
        self.open: dict[int, Ballot] = {}
        self.stopped: set[int] = set()
        self.boundary: dict[int, tuple[Ballot, int | None]] = {}
        # What the trainers of a node say again to the next life of its agent, by slot.
        self.told: dict[int, list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = {}
        # Newcomers whose trainers are not built yet.
        self.new: set[int] = set()
        self.joined: set[int] = set()
        self.entered: set[int] = set()
        # Those that may leave, as they were told to.
        self.left: set[int] = set()
        self.doom: dict[int, tuple[str, int, bool]] = {}
        self.commits: dict[int, list[MembershipView]] = {slot: [] for slot in self.home}
        # Every view that any trainer was ever told of, by epoch.
        self.decided: dict[int, MembershipView] = {}
        self.ends: dict[int, Over] = {}
        self.verbose = True

    # ---- trainers -----------------------------------------------------------------------------

    def slots(self, words: list[str]) -> list[int]:
        """Read SLOTS: "all", or numbers with commas or blanks between them."""
        return self.numbers(words, self.seated)

    @property
    def seated(self) -> list[int]:
        """The slots that an agent has."""
        return [slot for slot in sorted(self.home) if self.agent_of(slot) is not None]

    def numbers(self, words: list[str], known: Any) -> list[int]:
        """Read numbers, or "all" of the known ones."""
        if words == ["all"]:
            return list(known)
        return [int(number) for word in words for number in word.split(",")]

    def agent_of(self, slot: int) -> Agreement | None:
        """The agent that has a slot; None where none lives."""
        agreement = self.alive.get(self.home.get(slot, NOWHERE))
        return agreement if agreement is not None and slot in agreement.seats else None

    def tell(self, slot: int, what: str, *args: Any, settles: bool = True, **how: Any) -> None:
        """Have an agent told of one of its trainers, also in its next life."""
        agreement = self.agent_of(slot)
        if agreement is None:
            return
        said = self.told.setdefault(slot, [])
        said[:] = [one for one in said if one[0] != what]
        said.append((what, args, how))
        getattr(agreement, what)(slot, *args, **how)
        if settles:
            self.settle(agreement.node)

    def build(self, slot: int) -> None:
        """Start a trainer that is not in any view."""
        self.trainers.add(slot)
        self.outside.add(slot)
        self.commits[slot] = []
        self.at[slot] = (0, False)
        self.stopped.discard(slot)
        self.left.discard(slot)
        for state in (self.open, self.boundary):
            state.pop(slot, None)

    def end(self, slot: int) -> None:
        """End a trainer; its agent answers for it."""
        self.trainers.discard(slot)
        self.boundary.pop(slot, None)
        agreement, ballot = self.agent_of(slot), self.open.pop(slot, None)
        if agreement is not None and ballot is not None:
            agreement.quiesced(slot, ballot, None, partial(self.inventory, agreement))

    def inventory(self, agreement: Agreement) -> list[dict[str, int]]:
        """List what is sealed on a node."""
        return [{"owner": slot} for slot in sorted(agreement.seats)]

    # ---- agents -------------------------------------------------------------------------------

    def bury(self, node: int) -> None:
        """Remove a node with its trainers."""
        self.say(f"node {node} dies")
        self.alive.pop(node)
        for slot in [slot for slot, home in self.home.items() if home == node]:
            self.new.discard(slot)
            self.trainers.discard(slot)
            self.open.pop(slot, None)

    def restart(self, node: int) -> None:
        """Begin the next life of an agent, with what its node has stored."""
        self.say(f"the agent of node {node} dies")
        self.lives += 1
        record = from_json(Record, json.loads(json.dumps(self.records[node], default=to_json)))
        new = Agreement.of_next_life(
            record, node, timeouts=self.timeouts, life=self.lives, now_s=self.now_s
        )
        self.alive[node] = new
        for slot in new.seats:
            self.open.pop(slot, None)
            for what, args, how in list(self.told.get(slot, ())):
                getattr(new, what)(slot, *args, **how)
        for other in list(self.alive):
            if other != node:
                self.wires.pop((other, node), None)
                self.stale = self.stale - {(node, other)} | {(other, node)}
                self.wires.setdefault((node, other), deque()).append(NEW_LINK)
                self.order.append((node, other))
        self.settle(node)
        # They call while it may have been elected already, and have adopted a view.
        for slot in list(new.seats) if node in self.alive else ():
            self.tell_what_it_missed(slot, new)

    def tell_what_it_missed(self, slot: int, agreement: Agreement) -> None:
        """Tell a trainer of the newest view, where the last life of its agent had not."""
        known = self.commits.get(slot, [])
        missed = agreement.missed(slot, known[-1].epoch if known else 0)
        if slot in self.trainers and missed is not None:
            facts, _ = unpack_payload(missed.committed.payload)
            view = missed.committed.proposal.view
            self.enter(slot, agreement, view, [*missed.skipped, view], facts)

    def begin(self, node: int, message: Welcome) -> None:
        """Take part as the newcomer that was welcomed."""
        del self.asking[node]
        self.lives += 1
        self.alive[node] = Agreement.of_newcomer(
            message, node, timeouts=self.timeouts, life=self.lives
        )
        self.ends.pop(node, None)
        self.doom.pop(node, None)
        for slot in self.alive[node].seats:
            self.seat(slot, node)
        # Those that are gone by now it does not reach.
        gone = set(self.alive[node].nodes.living()) - self.alive.keys() - self.asking.keys()
        self.order += [(other, node) for other in sorted(gone)]
        # What came to it meanwhile is read now.
        self.order += [link for link, wire in self.wires.items() if link[1] == node for _ in wire]
        self.settle(node)

    def seat(self, slot: int, node: int) -> None:
        """Begin to build the first trainer of a slot on a node."""
        self.home[slot] = node
        self.told[slot] = []
        self.build(slot)
        self.trainers.discard(slot)
        self.new.add(slot)
        self.joined.add(slot)

    def give_up_asking(self) -> None:
        """A newcomer whose leader is gone, and has not welcomed it, asks no more."""
        for node, leader in list(self.asking.items()):
            if leader not in self.alive and not self.wires.get((leader, node)):
                self.say(f"node {node} gives up, it is not let in")
                del self.asking[node]
                self.order += [(node, other) for other in self.alive]

    def lose_who_is_needed(self, node: int) -> None:
        """Lose who is behind a broken link, where one of its ends leads."""
        agreement = self.alive[node]
        while not agreement.over:
            leader = agreement.leader
            gone = [far for near, far in sorted(self.broken) if near == node]
            needed = gone if leader == node else sorted({leader}.intersection(gone))
            if not needed:
                return
            for far in needed:
                self.broken.discard((node, far))
                agreement.lost(far, "its connection broke")

    def settle(self, node: int) -> None:
        """Carry out what an agent asks for, until it asks for nothing more."""
        if node not in self.alive or node in self.settling:
            return  # whatever it has heard meanwhile comes after what it is about to say
        self.settling.add(node)
        self.lose_who_is_needed(node)
        while node in self.alive and (effects := self.alive[node].settle(self.now_s)):
            self.store(node)
            agreement = self.alive[node]
            for effect in effects:
                if self.alive.get(node) is agreement:
                    self.carry_out(node, effect)
        if node in self.alive:
            self.store(node)
        self.settling.discard(node)

    def store(self, node: int) -> None:
        """Keep what the next life of an agent begins with."""
        self.records[node] = replace(self.alive[node].record())

    def carry_out(self, node: int, effect: Effect) -> None:
        """Do what the agreement of a node asks its agent to do."""
        match effect:
            case Send():
                self.send(node, effect.to, effect.message)
            case Ring():
                self.ring(node, effect)
            case Dismiss():
                self.say(f"{effect.slot}: may leave")
                self.left.add(effect.slot)
                self.trainers.discard(effect.slot)
                self.open.pop(effect.slot, None)
            case Deliver():
                self.deliver(node, effect)
            case Seated():
                self.seat(effect.worker.slot, node)
            case Vacated():
                self.say(f"{node}: gives slot {effect.slot} up")
                self.open.pop(effect.slot, None)
            case Disconnect():
                self.cut |= {(node, effect.node), (effect.node, node)}
                if effect.node in self.alive and effect.node not in self.ends:
                    self.alive[effect.node].lost(node, "its connection closed")
                    self.settle(effect.node)
            case Fence():
                self.say(f"{effect.slot}: fence: {effect.evidence}")
            case Over():
                self.say(f"{node}: over, exit code {effect.exit_code}: {effect.reason}")
                self.ends[node] = effect
            case Note():
                note = describe_note(effect)
                if note is not None:
                    self.say(f"{node}: {note}")

    def deliver(self, node: int, effect: Deliver) -> None:
        """Tell the trainers of a node of a view."""
        view = effect.committed.proposal.view
        skipped = [skipped.epoch for skipped in effect.skipped]
        facts, inventory = unpack_payload(effect.committed.payload)
        holders = [record["owner"] for record in inventory]
        self.say(
            f"{node}: commit view {view.epoch} ranks {list(view.ranks)} "
            f"facts of {sorted(facts)} inventory of {holders}"
            + (f" after {skipped}" if skipped else "")
        )
        agreement = self.alive[node]
        for slot in agreement.seats:
            if agreement.worker(slot) in view:
                self.enter(slot, agreement, view, [*effect.skipped, view], facts)

    def enter(
        self,
        slot: int,
        agreement: Agreement,
        view: MembershipView,
        told: list[MembershipView],
        facts: dict[int, dict[str, int]],
    ) -> None:
        """Have a trainer take part in a view."""
        self.boundary.pop(slot, None)
        self.stopped.discard(slot)
        self.open.pop(slot, None)
        newcomer = slot in self.outside
        if newcomer and slot in self.joined:
            self.entered.add(slot)
        self.outside.discard(slot)
        assert facts.keys() == {*view.ranks}, (sorted(facts), view)
        if newcomer:
            told = [one for one in agreement.history[1:] if one.epoch <= view.epoch]
        for known in told:
            assert self.decided.setdefault(known.epoch, known) == known
        if newcomer:
            self.commits[slot] = self.all_decided(told, list(facts.values()))
        else:
            self.commits[slot] = [*self.commits[slot], *told]
        if newcomer and view.epoch > 1 and agreement.seats[slot].incarnation:
            old = [fact["step"] for fact in facts.values() if not fact["entering"]]
            # Those that it meets stand before one and the same step, or have begun it.
            assert len(set(old)) <= 1, facts
        standing = [fact["step"] for fact in facts.values() if not fact["entering"]]
        self.at[slot] = (min(standing, default=0), False)

    def all_decided(
        self, told: list[MembershipView], facts: list[dict[str, int]]
    ) -> list[MembershipView]:
        """Return the views up to the last one told; one of the facts has applied those not told.

        Where all are newcomers, of a data-parallel job, no place follows from an earlier view.
        """
        decided = [view for epoch, view in sorted(self.decided.items()) if epoch <= told[-1].epoch]
        placed = max(fact["placed"] for fact in facts)
        if not all(fact["entering"] for fact in facts):
            assert all(view in told for view in decided if view.epoch > placed)
        assert all(view in told for view in decided[-2:])  # by which it knows who came
        return decided

    def ring(self, node: int, effect: Ring) -> None:
        """Interrupt the trainers of a node, at once or at the boundary of a step."""
        where = ""
        if effect.boundary:
            where = " between steps"
            if effect.before_step is not None:
                where += f", before step {effect.before_step}"
        self.say(f"{node}: ring {effect.ballot}{where}")
        agreement = self.alive[node]
        for slot in list(agreement.seats):
            if slot not in self.trainers:
                self.boundary.pop(slot, None)
                sealed = partial(self.inventory, agreement)
                agreement.quiesced(slot, effect.ballot, None, sealed)
                continue
            running = self.trainers - self.outside - set(self.open) - self.stopped
            step, begun = self.at[slot]
            waits = effect.boundary and slot in running
            if waits and (effect.before_step is None or (step, begun) < (effect.before_step, True)):
                self.boundary[slot] = effect.ballot, effect.before_step
                if effect.before_step is None:
                    agreement.begun(slot, effect.ballot, step if begun else step - 1)
            else:
                self.boundary.pop(slot, None)
                self.open[slot] = effect.ballot

    # ---- the network --------------------------------------------------------------------------

    def send(self, node: int, to: int, message: Message) -> None:
        """Put a message on its link, unless that is cut."""
        # Through the wire form and back, as between processes.
        message = from_json(Message, json.loads(json.dumps(message, default=to_json)))
        lost = {(node, to)} & (self.cut | self.stale)
        if (to in self.alive or to in self.asking) and not lost:
            self.wires.setdefault((node, to), deque()).append(message)
            self.order.append((node, to))
        kind = type(message).__name__.lower()
        if node in self.doom and self.doom[node][0] == kind:
            left = self.doom[node][1] - 1
            self.doom[node] = kind, left, self.doom[node][2]
            if left == 0 and self.doom[node][2]:
                self.restart(node)
            elif left == 0:
                self.bury(node)
                for other in list(self.alive):
                    # After what it has sent already: the end of a connection comes last.
                    self.wires.setdefault((node, other), deque())
                    self.order.append((node, other))

    def run(self, dice: random.Random | None = None, *, most: int = 100_000) -> None:
        """Deliver until nothing is under way; `dice` picks the link, else first come first.

        Or as many as `most`.
        """
        while self.order and most > 0:
            most -= 1
            if dice is not None:
                self.order.rotate(-dice.randrange(len(self.order)))
            sender, to = self.order.popleft()
            self.deliver_next(sender, to)

    def deliver_next(self, sender: int, to: int) -> None:
        """Deliver what comes next on a link, or the end of its sender."""
        wire = self.wires.get((sender, to))
        if to in self.asking and wire and isinstance(welcome := wire[0], Welcome):
            wire.popleft()
            self.say(f"{sender} -> {to}: {describe(welcome)}")
            self.begin(to, welcome)
            return
        self.give_up_asking()
        if to not in self.alive or (sender, to) in self.cut | self.held:
            return
        if wire:
            message = wire.popleft()
            if message == NEW_LINK:
                self.stale.discard((to, sender))
                self.alive[to].linked(
                    sender, self.alive[sender].committed.epoch if sender in self.alive else 0
                )
            else:
                if not isinstance(message, Stop):
                    self.say(f"{sender} -> {to}: {describe(message)}")
                self.alive[to].receive(sender, message, self.now_s)
        elif sender not in self.alive and sender not in self.asking:
            self.alive[to].lost(sender, "its connection closed")
        self.settle(to)

    def say(self, line: str) -> None:
        """Write down what happened."""
        if self.verbose:
            self.lines.append(f"  {line}")
