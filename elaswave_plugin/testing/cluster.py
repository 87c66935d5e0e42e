"""Runs the real agreement of many supervisors over a virtual network, in virtual time."""

import json
import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from elaswave_plugin.core.agreement.acceptor_state import NodeMemory
from elaswave_plugin.core.agreement.effects import (
    Connect,
    Deliver,
    Disconnect,
    Dismiss,
    Effect,
    Fence,
    Note,
    Over,
    Ring,
    Send,
)
from elaswave_plugin.core.agreement.join_rule import Applicant
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import (
    Ballot,
    Detached,
    Message,
    Raised,
    Stop,
    Welcome,
)
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import from_json, to_json
from elaswave_plugin.core.layout.reserve import NOWHERE
from elaswave_plugin.testing.described import describe, describe_note

T = TypeVar("T")


class Cluster:
    """Supervisors without processes, whose messages are delivered in a fixed or a random order.

    ``nodes``: the node of each slot at the launch, `NOWHERE` for one of the reserve. A test gives
    commands (`do`, `act` and `run`; docs/testing.md has them all) and reads what became of them:

    - ``alive``: the `Agreement` of each slot whose supervisor lives; ``trainers``: who trains
    - ``decided``: every view by its epoch; ``commits``: the views that each trainer was told
    - ``ends``: how the job ended for a slot; ``left``: who may leave, as it was told to
    - ``joined`` and ``entered``: newcomers that are let in, and those that take part
    - ``lines``: what happened, one line a message, view or end, unless ``verbose`` is off

    Messages pass through their wire form. Two trainers are never told different views of an epoch,
    and a newcomer meets the others between two steps: AssertionError if not.
    """

    def __init__(self, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.nodes = list(nodes)
        self.timeouts = timeouts
        self.settling: set[int] = set()
        self.alive = {
            slot: Agreement(slot=slot, nodes=nodes, timeouts=timeouts)
            for slot, node in enumerate(nodes)
            if node != NOWHERE
        }
        # What each node remembers, for as long as one of its supervisors lives.
        self.memories: dict[int, NodeMemory] = {}
        self.lives = 0
        self.wires: dict[tuple[int, int], deque[Message]] = {}
        self.order: deque[tuple[int, int]] = deque()
        self.open: dict[int, Ballot] = {}
        self.launched = frozenset(self.alive)
        self.trainers = set(self.alive)
        self.cut: set[tuple[int, int]] = set()
        # Those of them that nobody has acted on yet.
        self.broken: set[tuple[int, int]] = set()
        # Links that newcomers have opened and that the other end does not use yet.
        self.unread: set[tuple[int, int]] = set()
        # Newcomers that wait for the welcome of a leader, and then until all use their links.
        self.asking: dict[int, int] = {}
        self.welcomes: dict[int, Welcome] = {}
        # Newcomers whose trainers are not built yet.
        self.new: set[int] = set()
        self.joined: set[int] = set()
        self.entered: set[int] = set()
        # Those that may leave, as they were told to.
        self.left: set[int] = set()
        self.doom: dict[int, tuple[str, int]] = {}
        self.commits: dict[int, list[MembershipView]] = {slot: [] for slot in self.alive}
        # Every view that any trainer was ever told of, by epoch.
        self.decided: dict[int, MembershipView] = {}
        self.ends: dict[int, Over] = {}
        # Where each trainer is: (step, whether it has begun it), and who waits to be let in.
        self.at: dict[int, tuple[int, bool]] = dict.fromkeys(self.alive, (0, False))
        self.outside = set(self.alive)
        self.stopped: set[int] = set()
        self.boundary: dict[int, tuple[Ballot, int | None]] = {}
        self.verbose = True

    # ---- commands -----------------------------------------------------------------------------

    def do(self, command: str) -> None:
        """Act, and deliver until nothing is under way."""
        self.act(command)
        self.run()

    def act(self, command: str) -> None:
        """Make one thing happen, and deliver nothing. Raises ValueError for an unknown command."""
        name, *words = command.split()
        act = getattr(self, f"_do_{name}", None)
        if act is None:
            known = [one.removeprefix("_do_") for one in dir(self) if one.startswith("_do_")]
            raise ValueError(f"the command is {name!r}, wanted one of {', '.join(known)}")
        act(words)

    def _do_start(self, words: list[str]) -> None:
        """Begin the job: the leader proposes the first view."""
        for slot in list(self.alive):
            self.settle(slot)

    def _do_quiesce(self, words: list[str]) -> None:
        """Have trainers (SLOTS) stop and answer the open proposal."""
        for slot in self.slots(words):
            if slot in self.alive and slot in self.open:
                ballot = self.open.pop(slot)
                self.stopped.add(slot)
                step, begun = self.at[slot]
                entering = slot in self.outside
                placed = self.commits[slot][-1].epoch if self.commits[slot] else 0
                facts = {"at": slot, "step": step, "begun": begun, "entering": entering}
                facts["placed"] = placed
                self.alive[slot].quiesced(
                    ballot,
                    facts if slot in self.trainers else None,
                    [{"owner": slot}],
                    entering=entering,
                )
                self.settle(slot)

    def _do_step(self, words: list[str]) -> None:
        """Let trainers (SLOTS) go on, to the next boundary or over it where they may."""
        for slot in self.slots(words):
            running = self.trainers & set(self.alive) - self.outside - set(self.open)
            if slot not in running - self.stopped:
                continue
            step, begun = self.at[slot]
            if begun:
                # A step ends with a collective: nobody leaves it before everyone has begun it.
                view = self.commits[slot][-1]
                peers = [one for one in view.ranks if one in self.trainers]
                if all(
                    self.commits[one][-1:] == [view] and self.at[one] >= (step, True)
                    for one in peers
                ):
                    self.at[slot] = (step + 1, False)
                continue
            ballot, before = self.boundary.get(slot, (None, step + 1))
            if before is not None and step < before:
                self.at[slot] = (step, True)
            elif before is not None and ballot is not None:
                self.say(f"{slot}: stops before step {step}")
                self.open[slot] = ballot
                del self.boundary[slot]
                self._do_quiesce([str(slot)])

    def _do_respawn(self, words: list[str]) -> None:
        """Build new trainers (SLOTS), which wait to be let in."""
        for slot in self.slots(words):
            agreement = self.alive[slot]
            agreement.trainer_starts(agreement.incarnation + 1)
            self.trainers.add(slot)
            self.outside.add(slot)
            self.commits[slot] = []
            agreement.trainer_ready(self.now_s)
            self.settle(slot)

    def _do_join(self, words: list[str]) -> None:
        """Ask for a slot as another supervisor (SLOT NODE [SLOTS without a link])."""
        slot, node = map(int, words[:2])
        unlinked = self.slots(words[2:])
        linked = frozenset(set(self.alive) - set(unlinked))
        applicant = Applicant(slot=slot, node=node, address=f"of {slot}", linked=linked)
        answers = {}
        for one in sorted(set(self.alive) - set(self.ends)):
            answers[one] = self.alive[one].admit(applicant)
            if answers[one].reason is None:
                self.nodes[slot] = node
                self.asking[slot] = one
                self.ends.pop(slot, None)
                for other in self.alive:
                    for link in ((slot, other), (other, slot)):
                        self.wires.pop(link, None)
                        self.cut.discard(link)
                        self.unread.discard(link)
                    self.unread.add((slot, other))
                self.settle(one)
                return
        why = {answer.reason for answer in answers.values() if not answer.later}
        why = why or {answer.reason for answer in answers.values()}
        self.say(f"worker {slot} on node {node} is not let in: {'; '.join(sorted(map(str, why)))}")

    def _do_ready(self, words: list[str]) -> None:
        """Build the trainers of newcomers (SLOTS), which wait to be let in."""
        for slot in self.slots(words):
            self.new.discard(slot)
            self.trainers.add(slot)
            self.alive[slot].trainer_ready(self.now_s)
            self.settle(slot)

    def begin_or_give_up(self) -> None:
        """Begin as a newcomer once all that it was told of use its links, or give up."""
        for slot, leader in list(self.asking.items()):
            message = self.welcomes.get(slot)
            if message is None:
                gives_up = leader not in self.alive and not self.wires.get((leader, slot))
                waits = not gives_up
            else:
                living = set(range(len(self.nodes))) - message.lost.keys() - {slot}
                gives_up = not living <= self.alive.keys()
                gives_up = gives_up or any((slot, one) in self.cut for one in living)
                waits = any((slot, one) in self.unread for one in living)
            if gives_up:
                self.give_up(slot)
            elif message is not None and not waits:
                self.begin(message)

    def give_up(self, slot: int) -> None:
        """Close the links of a newcomer, as one does that has waited for long."""
        self.say(f"{slot}: gives up, it is not let in by all")
        del self.asking[slot]
        self.welcomes.pop(slot, None)
        self.order += [(slot, other) for other in self.alive]

    def begin(self, message: Welcome) -> None:
        """Take part as the newcomer that was welcomed."""
        slot = message.worker.slot
        del self.asking[slot], self.welcomes[slot]
        if all(self.nodes[other] != self.nodes[slot] for other in self.alive):
            self.memories.pop(self.nodes[slot], None)
        self.lives += 1
        self.alive[slot] = Agreement.of_newcomer(message, timeouts=self.timeouts, life=self.lives)
        self.new.add(slot)
        self.joined.add(slot)
        self.left.discard(slot)
        self.outside.add(slot)
        self.commits[slot] = []
        self.at[slot] = (0, False)
        self.stopped.discard(slot)
        for state in (self.open, self.boundary, self.doom):
            state.pop(slot, None)
        # What came to it meanwhile is read now.
        self.order += [link for link, wire in self.wires.items() if link[1] == slot for _ in wire]
        self.settle(slot)

    def _do_notice(self, words: list[str]) -> None:
        """Tell trainers to leave between two steps (SLOTS [saves] [asked])."""
        for slot in self.slots(words[:1]):
            how = {"saves_last": "saves" in words, "asked": "asked" in words}
            self.alive[slot].give_notice("it is drained", self.now_s, **how)
            self.settle(slot)

    def _do_replan(self, words: list[str]) -> None:
        """Tell trainers (SLOTS) what layout somebody wants."""
        for slot in self.slots(words):
            self.alive[slot].replan("layers move", self.now_s)
            self.settle(slot)

    def _do_seal(self, words: list[str]) -> None:
        """Have trainers (SLOTS) seal their first snapshot."""
        for slot in self.slots(words):
            self.alive[slot].first_seal()
            self.settle(slot)

    def _do_exit(self, words: list[str]) -> None:
        """End trainers in the same moment (SLOTS CODE|SIGNAL [STEP]).

        With a step, by an exception of their scripts, in the same line.
        """
        code = int(words[1]) if words[1].isdigit() else None
        evidence = f"exit code {code}" if code is not None else f"killed by {words[1]}"
        raised = None
        if words[2:]:
            when = f"in step {words[2]}"
            raised = Raised(error="ValueError", message="no", where="train.py:7", when=when)
        slots = self.slots(words[:1])
        for slot in slots:
            self.trainers.discard(slot)
            self.boundary.pop(slot, None)
            self.alive[slot].trainer_failed(evidence, code, self.now_s, raised=raised)
            ballot = self.open.pop(slot, None)
            if ballot is not None:
                self.alive[slot].quiesced(ballot, None, [{"owner": slot}])
        for slot in slots:
            self.settle(slot)

    def _do_done(self, words: list[str]) -> None:
        """Have trainers finish, and with a code exit too (SLOTS [CODE])."""
        for slot in self.slots(words[:1]):
            self.trainers.discard(slot)
            self.boundary.pop(slot, None)
            self.alive[slot].trainer_done(int(words[1]) if words[1:] else None)
            ballot = self.open.pop(slot, None)
            if ballot is not None:
                self.alive[slot].quiesced(ballot, None, [{"owner": slot}])
            self.settle(slot)

    def _do_detached(self, words: list[str]) -> None:
        """Say that trainers (SLOTS) train and have not joined."""
        for slot in self.slots(words):
            self.alive[slot].detached(Detached(trains=True, missing="a flag"))
            self.settle(slot)

    def _do_kill(self, words: list[str]) -> None:
        """Kill supervisors (SLOTS) in the same moment."""
        dead = self.slots(words)
        for slot in dead:
            self.bury(slot)
        for slot in list(self.alive):
            if slot in self.alive:  # the leader may have killed it, on its own node
                for gone in dead:
                    self.alive[slot].lost(gone, "its connection closed")
                self.settle(slot)

    def _do_doom(self, words: list[str]) -> None:
        """Kill a supervisor once it has sent N messages of a kind (SLOT KIND N)."""
        self.doom[int(words[0])] = words[1], int(words[2])

    def _do_part(self, words: list[str]) -> None:
        """Break the links between A and B, and those between C and D (A B [C D ...])."""
        pairs = zip(words[::2], words[1::2], strict=True)
        cut = [
            (a, b) for one, other in pairs for a in self.slots([one]) for b in self.slots([other])
        ]
        both = [*cut, *((b, a) for a, b in cut)]
        for slot, far in sorted(both):
            self.cut.add((slot, far))
            self.wires.pop((slot, far), None)
            self.alive[slot].lost(far, "its connection broke")
        for slot in dict.fromkeys(slot for pair in cut for slot in pair):
            self.settle(slot)

    def _do_sunder(self, words: list[str]) -> None:
        """Break links as `part` does; who is behind one is lost only where one end leads.

        Coordinators do the same (`Coordinator._lose_who_is_needed`).
        """
        for one, other in zip(words[::2], words[1::2], strict=True):
            for a in self.slots([one]):
                for b in self.slots([other]):
                    self.cut |= {(a, b), (b, a)}
                    self.broken |= {(a, b), (b, a)}
                    self.wires.pop((a, b), None)
                    self.wires.pop((b, a), None)
        for slot in list(self.alive):
            self.settle(slot)

    def lose_who_is_needed(self, slot: int) -> None:
        """Lose who is behind a broken link, where one of its ends leads."""
        agreement = self.alive[slot]
        for _ in self.nodes:
            leader = agreement.leader
            gone = [far for near, far in sorted(self.broken) if near == slot]
            for far in gone if leader == slot else {leader}.intersection(gone):
                self.broken.discard((slot, far))
                agreement.lost(far, "its connection broke")

    def _do_tick(self, words: list[str]) -> None:
        """Let SECONDS pass; with the beats each learns which leader its node follows."""
        self.now_s += float(words[0])
        for slot, agreement in self.alive.items():
            agreement.recall(self.memories.get(self.nodes[slot], NodeMemory()), self.now_s)
        for slot in list(self.alive):
            self.settle(slot)

    def _do_sever(self, words: list[str]) -> None:
        """Break a data link of trainers (SLOTS), which stay alive."""
        for slot in self.slots(words):
            epoch = self.commits[slot][-1].epoch
            self.alive[slot].severed(epoch, "a link broke", self.now_s)
            self.settle(slot)

    def _do_progress(self, words: list[str]) -> None:
        """Let trainers (SLOTS) show that they work."""
        for slot in self.slots(words):
            self.alive[slot].progress(self.now_s)

    # ---- the network --------------------------------------------------------------------------

    def slots(self, words: list[str]) -> list[int]:
        """Read SLOTS: "all", or numbers with commas or blanks between them."""
        if words == ["all"]:
            return list(self.alive)
        return [int(slot) for word in words for slot in word.split(",")]

    def bury(self, slot: int) -> None:
        """Remove a supervisor with its trainer."""
        self.say(f"{slot}: supervisor dies")
        self.alive.pop(slot)
        self.new.discard(slot)
        self.trainers.discard(slot)
        self.open.pop(slot, None)

    def settle(self, slot: int) -> None:
        """Carry out what a supervisor asks for, until it asks for nothing more."""
        if slot not in self.alive or slot in self.settling:
            return  # whatever it has heard meanwhile comes after what it is about to say
        self.settling.add(slot)
        self.lose_who_is_needed(slot)
        while slot in self.alive and (effects := self.vote(slot, Agreement.settle)):
            for effect in effects:
                if slot in self.alive:
                    self.carry_out(slot, effect)
        self.settling.discard(slot)

    def vote(self, slot: int, act: Callable[..., T], *words: object) -> T:
        """Settle or receive as this supervisor, with the memory of its node."""
        agreement, node = self.alive[slot], self.nodes[slot]
        message = words[1] if words else None
        if not agreement.votes(message):  # type: ignore[arg-type]
            known = agreement.memory
            try:
                return act(agreement, *words, self.now_s)
            finally:
                assert agreement.memory is known
        agreement.recall(self.memories.get(node, NodeMemory()), self.now_s)
        try:
            return act(agreement, *words, self.now_s)
        finally:
            self.memories[node] = agreement.memory

    def carry_out(self, slot: int, effect: Effect) -> None:
        """Do what the agreement of a slot asks its supervisor to do."""
        match effect:
            case Send():
                self.send(slot, effect.to, effect.message)
            case Ring():
                self.ring(slot, effect)
            case Dismiss():
                self.say(f"{slot}: may leave")
                self.left.add(slot)
                self.trainers.discard(slot)
                self.open.pop(slot, None)
            case Deliver():
                view = effect.committed.proposal.view
                skipped = [skipped.epoch for skipped in effect.skipped]
                payload = json.loads(effect.committed.payload)
                facts = {int(slot): one for slot, one in payload["facts"].items()}
                holders = [record["owner"] for record in payload["inventory"]]
                self.say(
                    f"{slot}: commit view {view.epoch} ranks {list(view.ranks)} "
                    f"facts of {sorted(facts)} inventory of {holders}"
                    + (f" after {skipped}" if skipped else "")
                )
                self.boundary.pop(slot, None)
                self.stopped.discard(slot)
                newcomer = slot in self.outside
                if newcomer and slot in self.joined:
                    self.entered.add(slot)
                self.outside.discard(slot)
                told = self.alive[slot].history[1:] if newcomer else [*effect.skipped, view]
                for known in told:
                    assert self.decided.setdefault(known.epoch, known) == known
                if newcomer:
                    self.commits[slot] = self.all_decided(told, list(facts.values()))
                else:
                    self.commits[slot] = [*self.commits[slot], *told]
                if newcomer and view.epoch > 1 and self.alive[slot].incarnation:
                    old = [fact["step"] for fact in facts.values() if not fact["entering"]]
                    # Those that it meets stand before one and the same step, or have begun it.
                    assert len(set(old)) <= 1, facts
                self.at[slot] = (
                    (min(fact["step"] for fact in facts.values() if not fact["entering"]), False)
                    if any(not fact["entering"] for fact in facts.values())
                    else (0, False)
                )
            case Disconnect() if effect.kill and self.nodes[slot] == self.nodes[effect.slot]:
                self.cut |= {(slot, effect.slot), (effect.slot, slot)}
                if effect.slot in self.alive and effect.slot not in self.ends:
                    self.bury(effect.slot)
                    self.order += [(effect.slot, other) for other in self.alive]
            case Disconnect():
                self.cut |= {(slot, effect.slot), (effect.slot, slot)}
                if effect.slot in self.alive and effect.slot not in self.ends:
                    self.alive[effect.slot].lost(slot, "its connection closed")
                    self.settle(effect.slot)
            case Connect():
                link = (effect.slot, slot)
                self.unread.discard(link)
                self.begin_or_give_up()
                gone = effect.slot not in self.alive and effect.slot not in self.asking
                self.order += [link] * (len(self.wires.get(link, ())) + gone)
            case Fence():
                self.say(f"{slot}: fence: {effect.evidence}")
            case Over():
                self.say(f"{slot}: over, exit code {effect.exit_code}: {effect.reason}")
                self.ends[slot] = effect
            case Note():
                note = describe_note(effect)
                if note is not None:
                    self.say(f"{slot}: {note}")

    def all_decided(
        self, told: list[MembershipView], facts: list[dict[str, int]]
    ) -> list[MembershipView]:
        """Return the views up to the last one told; one of the facts has applied those not told."""
        decided = [view for epoch, view in sorted(self.decided.items()) if epoch <= told[-1].epoch]
        placed = max(fact["placed"] for fact in facts)
        assert all(view in told for view in decided if view.epoch > placed)
        assert all(view in told for view in decided[-2:])  # by which it knows who came
        return decided

    def ring(self, slot: int, effect: Ring) -> None:
        """Interrupt the trainer of a slot, at once or at the boundary of a step."""
        where = ""
        if effect.boundary:
            where = " between steps"
            if effect.before_step is not None:
                where += f", before step {effect.before_step}"
        self.say(f"{slot}: ring {effect.ballot}{where}")
        running = self.trainers - self.outside - set(self.open) - self.stopped
        waits = effect.boundary and slot in running
        step, begun = self.at[slot]
        if waits and (effect.before_step is None or (step, begun) < (effect.before_step, True)):
            self.boundary[slot] = effect.ballot, effect.before_step
            if effect.before_step is None:
                self.alive[slot].begun(effect.ballot, step if begun else step - 1)
        else:
            self.boundary.pop(slot, None)
            self.open[slot] = effect.ballot

    def send(self, slot: int, to: int, message: Message) -> None:
        """Put a message on its link, unless that is cut."""
        # Through the wire form and back, as between processes.
        message = from_json(Message, json.loads(json.dumps(message, default=to_json)))
        if (to in self.alive or to in self.asking) and (slot, to) not in self.cut:
            self.wires.setdefault((slot, to), deque()).append(message)
            self.order.append((slot, to))
        kind = type(message).__name__.lower()
        if slot in self.doom and self.doom[slot][0] == kind:
            left = self.doom[slot][1] - 1
            self.doom[slot] = kind, left
            if left == 0:
                self.bury(slot)
                for other in list(self.alive):
                    # After what it has sent already: the end of a connection comes last.
                    self.wires.setdefault((slot, other), deque())
                    self.order.append((slot, other))

    def run(self, dice: random.Random | None = None, *, most: int = 100_000) -> None:
        """Deliver until nothing is under way; `dice` picks the link, else first come first.

        Or as many as `most`.
        """
        while self.order and most > 0:
            most -= 1
            if dice is not None:
                self.order.rotate(-dice.randrange(len(self.order)))
            sender, to = self.order.popleft()
            wire = self.wires.get((sender, to))
            if to in self.asking and wire and isinstance(welcome := wire[0], Welcome):
                wire.popleft()
                self.say(f"{sender} -> {to}: {describe(welcome)}")
                self.welcomes[to] = welcome
            self.begin_or_give_up()
            if to not in self.alive or {(sender, to)} & (self.cut | self.unread):
                continue
            if wire:
                message = wire.popleft()
                if not isinstance(message, Stop):
                    self.say(f"{sender} -> {to}: {describe(message)}")
                self.vote(to, Agreement.receive, sender, message)
            elif sender not in self.alive and sender not in self.asking:
                self.alive[to].lost(sender, "its connection closed")
            self.settle(to)

    def say(self, line: str) -> None:
        """Write down what happened."""
        if self.verbose:
            self.lines.append(f"  {line}")
