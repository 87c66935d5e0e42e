"""The commands of a cluster: the things that a test has happen to a virtual job."""

from collections import deque
from functools import partial

from elaswave_plugin.core.agreement.messages import (
    Detached,
    Raised,
    Replan,
    Severed,
)
from elaswave_plugin.core.agreement.quorum import Applicant
from elaswave_plugin.testing.virtual_job import NEW_LINK, VirtualJob


class Cluster(VirtualJob):
    """A virtual job to which commands happen: `do`, `act` and `run`.

    docs/testing.md has them all; what became of them is read off (`VirtualJob`).
    """

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
        for node in list(self.alive):
            self.settle(node)

    def _do_quiesce(self, words: list[str]) -> None:
        """Have trainers (SLOTS) stop and answer the open proposal."""
        for slot in self.slots(words):
            agreement = self.agent_of(slot)
            if agreement is not None and slot in self.open:
                ballot = self.open.pop(slot)
                self.stopped.add(slot)
                step, begun = self.at[slot]
                entering = slot in self.outside
                placed = self.commits[slot][-1].epoch if self.commits[slot] else 0
                facts = {"at": slot, "step": step, "begun": begun, "entering": entering}
                facts["placed"] = placed
                agreement.quiesced(
                    slot,
                    ballot,
                    facts if slot in self.trainers else None,
                    partial(self.inventory, agreement),
                    entering=entering,
                )
                self.settle(agreement.node)

    def _do_step(self, words: list[str]) -> None:
        """Let trainers (SLOTS) go on, to the next boundary or over it where they may."""
        for slot in self.slots(words):
            running = self.trainers - self.outside - set(self.open)
            if slot not in running - self.stopped or self.agent_of(slot) is None:
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
            agreement = self.agent_of(slot)
            if agreement is None:
                continue
            agreement.trainer_starts(slot, agreement.seats[slot].incarnation + 1)
            self.told[slot] = []
            self.build(slot)
            self.tell(slot, "trainer_ready", self.now_s)

    def _do_join(self, words: list[str]) -> None:
        """Ask for slots as the agent of a node (NODE SLOTS)."""
        node, slots = int(words[0]), tuple(self.slots(words[1:]))
        applicant = Applicant(node=node, slots=slots, address=f"of {node}")
        answers = {}
        for one in sorted(set(self.alive) - set(self.ends)):
            answers[one] = self.alive[one].admit(applicant)
            if answers[one].reason is None:
                if node not in self.alive:
                    self.asking[node] = one
                    self.records.pop(node, None)
                self.settle(one)
                return
        why = {answer.reason for answer in answers.values() if not answer.later}
        why = why or {answer.reason for answer in answers.values()}
        self.say(f"node {node} is not let in: {'; '.join(sorted(map(str, why)))}")

    def _do_ready(self, words: list[str]) -> None:
        """Build the trainers of newcomers (SLOTS), which wait to be let in."""
        for slot in self.slots(words):
            self.new.discard(slot)
            self.trainers.add(slot)
            self.tell(slot, "trainer_ready", self.now_s)

    def _do_notice(self, words: list[str]) -> None:
        """Tell trainers to leave between two steps (SLOTS [saves] [asked])."""
        for slot in self.slots(words[:1]):
            how = {"saves_last": "saves" in words, "asked": "asked" in words}
            self.tell(slot, "give_notice", "it is drained", self.now_s, **how)

    def _do_replan(self, words: list[str]) -> None:
        """Tell trainers (SLOTS) what layout somebody wants."""
        for slot in self.slots(words):
            if (agreement := self.agent_of(slot)) is not None:
                epoch = agreement.committed.epoch
                agreement.tell_leader(Replan(epoch=epoch, reason="layers move"), self.now_s)
                self.settle(agreement.node)

    def _do_seal(self, words: list[str]) -> None:
        """Have trainers (SLOTS) seal their first snapshot."""
        for slot in self.slots(words):
            self.tell(slot, "first_seal")

    def _do_settle(self, words: list[str]) -> None:
        """Have trainers (SLOTS) need nothing that was sealed before their last view."""
        for slot in self.slots(words):
            if self.commits.get(slot) and slot in self.trainers:
                self.tell(slot, "settled", self.commits[slot][-1].epoch)

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
            self.tell(
                slot, "trainer_failed", evidence, code, self.now_s, settles=False, raised=raised
            )
            self.end(slot)
        for slot in slots:
            self.settle(self.home[slot])

    def _do_done(self, words: list[str]) -> None:
        """Have trainers finish, and with a code exit too (SLOTS [CODE [STEP]])."""
        code = int(words[1]) if words[1:] else None
        when = f"in step {words[2]}" if words[2:] else ""
        for slot in self.slots(words[:1]):
            self.tell(slot, "trainer_done", code, when, settles=False)
            self.end(slot)
            self.settle(self.home[slot])

    def _do_detached(self, words: list[str]) -> None:
        """Say that trainers (SLOTS) train and have not joined."""
        for slot in self.slots(words):
            if (agreement := self.agent_of(slot)) is not None:
                agreement.detached(Detached(slot=slot, trains=True, missing="a flag"))
                self.settle(agreement.node)

    def _do_progress(self, words: list[str]) -> None:
        """Let trainers (SLOTS) show that they work."""
        for slot in self.slots(words):
            if (agreement := self.agent_of(slot)) is not None:
                agreement.progress(slot, self.now_s)

    def _do_sever(self, words: list[str]) -> None:
        """Break a data link of trainers (SLOTS), which stay alive."""
        for slot in self.slots(words):
            if (agreement := self.agent_of(slot)) is not None:
                epoch = self.commits[slot][-1].epoch
                agreement.tell_leader(Severed(epoch=epoch, evidence="a link broke"), self.now_s)
                self.settle(agreement.node)

    def _do_kill(self, words: list[str]) -> None:
        """Kill nodes (NODES) in the same moment, with their trainers."""
        dead = self.numbers(words, self.alive)
        for node in dead:
            self.bury(node)
        for node in list(self.alive):
            if node in self.alive:
                for gone in dead:
                    self.alive[node].lost(gone, "its connection closed")
                self.settle(node)

    def _do_restart(self, words: list[str]) -> None:
        """End the agents of nodes (NODES), whose trainers go on; the next lives begin at once."""
        for node in self.numbers(words, self.alive):
            if node in self.alive and node not in self.ends:
                self.restart(node)

    def _do_relink(self, words: list[str]) -> None:
        """Open the link of two nodes (A B) again: what was under way on it is lost."""
        a, b = map(int, words)
        for one, other in ((a, b), (b, a)):
            self.wires[one, other] = deque([NEW_LINK])
            self.stale.add((one, other))
            self.order.append((one, other))

    def _do_doom(self, words: list[str]) -> None:
        """Kill a node once it has sent N messages of a kind (NODE KIND N), or restart its agent.

        The latter where `restart` follows.
        """
        self.doom[int(words[0])] = words[1], int(words[2]), words[3:] == ["restart"]

    def _do_part(self, words: list[str]) -> None:
        """Break the links between nodes A and B, and those between C and D (A B [C D ...])."""
        pairs = zip(words[::2], words[1::2], strict=True)
        cut = [
            (a, b)
            for one, other in pairs
            for a in self.numbers([one], self.alive)
            for b in self.numbers([other], self.alive)
        ]
        both = [*cut, *((b, a) for a, b in cut)]
        for node, far in sorted(both):
            self.cut.add((node, far))
            self.wires.pop((node, far), None)
            self.alive[node].lost(far, "its connection broke")
        for node in dict.fromkeys(node for pair in cut for node in pair):
            self.settle(node)

    def _do_sunder(self, words: list[str]) -> None:
        """Break links as `part` does; who is behind one is lost only where one end leads.

        Coordinators do the same (`Coordinator._lose_who_is_needed`).
        """
        for one, other in zip(words[::2], words[1::2], strict=True):
            for a in self.numbers([one], self.alive):
                for b in self.numbers([other], self.alive):
                    self.cut |= {(a, b), (b, a)}
                    self.broken |= {(a, b), (b, a)}
                    self.wires.pop((a, b), None)
                    self.wires.pop((b, a), None)
        for node in list(self.alive):
            self.settle(node)

    def _do_tick(self, words: list[str]) -> None:
        """Let SECONDS pass."""
        self.now_s += float(words[0])
        for node in list(self.alive):
            self.settle(node)
