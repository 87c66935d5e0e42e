"""Walks through all orders in which nodes that see one folder found a job, join it and lose it.

The real rules (`core/agreement/founding.py`) run on one record. Time is a move: between two ticks
any process may do nothing, as one that is stopped, or whose file system stands still.
"""

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.agreement.founding import (
    LEASE_S,
    MEETS,
    Founder,
    JobRecord,
    Join,
    LastCall,
    Start,
    ended,
    renewed,
)
from elaswave_plugin.errors import EXIT_REQUEUE
from tests.explore.search import Found
from tests.explore.visits import visit

PROGRAM = {"script": "train.py"}
MOST_LIVES = 3
TICK_S = 6.0
"""One tick is longer than a node that waits may be silent, two are longer than a lease."""
OLD = 3
_ROUNDS = 15


@dataclass(slots=True)
class Node:
    """A process that lives, and its part: it waits, meets, joins, or is in a life."""

    who: str
    founder: Founder
    at: str = "waits"
    life: int = 0
    since: int = 0


class Folder:
    """The record, the nodes, and the lives that have begun with their members and leases.

    ``names``: a letter a node, of which ``least`` can begin; ``leases``: when the renewal of a life
    began that was written last; ``begun``: when one began that is still to be written.
    """

    def __init__(self, names: str, least: int) -> None:
        self.names = names
        self.least = least
        self.now = 0
        self.record = JobRecord()
        self.nodes: dict[str, Node] = {}
        self.members: dict[int, frozenset[str]] = {}
        self.leases: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.starts: dict[str, int] = {}

    def fork(self) -> "Folder":
        """Copy it: what is frozen is shared."""
        new = copy.copy(self)
        for name in ("members", "leases", "begun", "starts"):
            setattr(new, name, {**getattr(self, name)})
        new.nodes = {}
        for name, node in self.nodes.items():
            other = new.nodes[name] = copy.copy(node)
            other.founder = self._founder(node.who)
            other.founder._looks = node.founder._looks
            other.founder._tried_life = node.founder._tried_life
            other.founder._seen._since = {**node.founder._seen._since}
        return new

    def _founder(self, who: str) -> Founder:
        most = len(self.names)
        call = LastCall(self.least, most, last_call_s=0.0, fits=lambda nodes: True)
        return Founder(who, program=PROGRAM, last_call=call)

    @property
    def is_far(self) -> bool:
        """True if enough lives have begun."""
        return self.record.life > MOST_LIVES

    def mark(self) -> tuple[object, ...]:
        """All that may matter for what happens next: ages, and no moments."""
        record = self.record
        lives = tuple(
            (life, who, self._age(self.leases.get(life)), self._age(self.begun.get(life)))
            for life, who in sorted(self.members.items())
        )
        nodes = tuple((name, self._mark_of(node)) for name, node in sorted(self.nodes.items()))
        parts = record.life, record.state, record.founder, record.chosen, record.contacts
        return *parts, tuple(record.waiting), record.exit_code, lives, nodes

    def _mark_of(self, node: Node) -> tuple[object, ...]:
        record, seen = self.record, node.founder._seen._since
        known: list[tuple[Hashable, int]] = [
            (("node", who), one.looks) for who, one in record.waiting.items()
        ]
        known.append((("renewals", record.life, record.state), record.renewals))
        stood = tuple(
            self._age(round(seen[name][1] / TICK_S)) if seen.get(name, ((),))[0] == value else None
            for name, value in known
        )
        tried = node.founder._tried_life == record.life
        return node.who, node.at, node.life, tried, self._age(node.since), stood

    def _age(self, since: int | None) -> int | None:
        return None if since is None else min(self.now - since, OLD)

    # ---- moves --------------------------------------------------------------------------------

    def usual(self) -> Iterator[str]:
        """List what may happen next without any fault."""
        yield "tick"
        for name in self.names:
            node = self.nodes.get(name)
            if node is None:
                yield f"start {name}"
            elif node.at == "waits":
                yield f"look {name}"
            elif node.at == "joins":
                yield f"enter {name}"
            elif node.at == "meets" and self._age(node.since) == OLD:
                yield f"give_up {name}"
        if self._all_there():
            yield "meet"
        for life in self._renewing():
            yield f"{'write' if life in self.begun else 'begin'} {life}"

    def faults(self) -> Iterator[str]:
        """List what may go wrong next."""
        for name, node in sorted(self.nodes.items()):
            yield f"kill {name}"
            if node.at == "joins":
                yield f"refuse {name}"
        for life, members in self.members.items():
            if members:
                yield f"end {life}"

    def make(self, move: str) -> None:
        """Make a move in place; raises AssertionError where two lives train."""
        kind, *words = move.split()
        getattr(self, f"_{kind}")(*words)
        train = [life for life, who in self.members.items() if who and self._has_lease(life)]
        assert len(train) <= 1, f"lives {train} train"

    def _has_lease(self, life: int) -> bool:
        began = self.leases.get(life)
        return began is not None and (self.now - began) * TICK_S < LEASE_S

    def _tick(self) -> None:
        self.now += 1

    def _start(self, name: str) -> None:
        number = self.starts.get(name, 0)
        self.starts[name] = number + 1
        self.nodes[name] = Node(f"{name}{number}", self._founder(f"{name}{number}"))

    def _look(self, name: str) -> None:
        node = self.nodes[name]
        self.record, decision = node.founder.look(
            self.record, self.now * TICK_S, address=name, scripts_port=1
        )
        node.founder.decided(decision)
        if isinstance(decision, Start | Join):
            node.at = "meets" if isinstance(decision, Start) else "joins"
            node.life, node.since = decision.life, self.now

    def _wait(self, node: Node) -> None:
        self.record = node.founder.start_failed(self.record, node.life)
        node.at, node.life = "waits", 0

    def _give_up(self, name: str) -> None:
        self._wait(self.nodes[name])

    def _enter(self, name: str) -> None:
        """Be let in by a member, or wait again."""
        node = self.nodes[name]
        if self.members.get(node.life):
            node.at = "in"
            self.members[node.life] |= {name}
        else:
            self._wait(node)

    def _refuse(self, name: str) -> None:
        """The job that it would join is full, or is not reached from there."""
        self._wait(self.nodes[name])

    def _all_there(self) -> bool:
        record = self.record
        there = {
            one.who for one in self.nodes.values() if (one.at, one.life) == ("meets", record.life)
        }
        return record.state != MEETS and bool(record.chosen) and there >= {*record.chosen}

    def _meet(self) -> None:
        life = self.record.life
        names = [name for name, node in self.nodes.items() if node.who in self.record.chosen]
        self.members[life] = frozenset(names)
        for name in names:
            self.nodes[name].at = "in"

    def _renewing(self) -> list[int]:
        """List the lives with agents that renew the record."""
        return [life for life, who in self.members.items() if who]

    def _begin(self, number: str) -> None:
        self.begun[int(number)] = self.now

    def _write(self, number: str) -> None:
        """Renew the record by what was begun; a life that is over there ends."""
        life = int(number)
        began = self.begun.pop(life)
        record = renewed(self.record, life, tuple(sorted(self.members[life])))
        if record is None:
            self._over(life)
        else:
            self.record, self.leases[life] = record, began

    def _over(self, life: int) -> None:
        for name in self.members[life]:
            self._wait(self.nodes[name])
        self.members[life] = frozenset()

    def _kill(self, name: str) -> None:
        del self.nodes[name]
        self.members = {life: who - {name} for life, who in self.members.items()}

    def _end(self, number: str) -> None:
        """Have the record tell an end that asks for another life, before all its members know."""
        self.record = ended(self.record, int(number), EXIT_REQUEUE) or self.record

    def come_to_rest(self) -> None:
        """Have all nodes started, and each do its usual moves in turn, a tick after the other."""
        for _ in range(_ROUNDS):
            for name in self.names:
                if name not in self.nodes:
                    self._start(name)
                for kind, at in (("look", "waits"), ("enter", "joins")):
                    if self.nodes[name].at == at:
                        self.make(f"{kind} {name}")
            if self._all_there():
                self.make("meet")
            for life in self._renewing():
                self._begin(str(life))
                self.make(f"write {life}")
            for name, node in self.nodes.items():
                if node.at == "meets" and self._age(node.since) == OLD:
                    self.make(f"give_up {name}")
            self._tick()
        states = [(name, node.at, node.life) for name, node in self.nodes.items()]
        assert {(at, life) for _, at, life in states} == {("in", self.record.life)}, states


def explore_folder(names: str, least: int, **more: Any) -> Found:
    """Visit each state once, as `visit` does: a job of ``least`` of these nodes, or more of them.

    Two lives never train at the same time; and from one state in `share` all nodes come to one job.
    """
    return visit(Folder(names, least), **more)
