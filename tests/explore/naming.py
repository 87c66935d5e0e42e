"""Walks through all orders in which nodes that list their names found a job, join it and lose it.

The real rules (`core/agreement/named.py`) run on a network that a few faults disturb. Time is a
choice: what a name has heard may be old by now, and a meeting may have taken too long.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.core.agreement.founding import GONE_S, OVER_S, Join, LastCall, Start
from elaswave_plugin.core.agreement.named import Call, Known, Name, NamedFounder, Own, Renewal
from elaswave_plugin.core.agreement.named import digest as digest_of
from tests.explore.search import Found
from tests.explore.visits import act, come_to_rest, visit

NAMES = ("a", "b", "c")
LEAST = 2
PROGRAM = {"script": "train.py"}
MOST_LIVES = 3
_ROUNDS = 12


@dataclass(slots=True)
class Node:
    """A process that lives: its name's memory, and what its node does; `at`: of a life."""

    who: str
    name: Name
    founder: NamedFounder
    at: str = "waits"
    life: int = 0
    looked: bool = False
    now_s: float = 0.0
    answers: dict[str, Known | None] = field(default_factory=dict)
    asked: int = 0

    def mark(self) -> tuple[object, ...]:
        """All that may matter for what happens next, with times as yes or no."""
        name, founder = self.name, self.founder
        calls = (who for who, at_s in name._asked_s.items() if self.now_s - at_s <= GONE_S)
        known = name._known
        is_fresh = self.now_s - name._renewed_s <= GONE_S
        heard = (known.job, known.contacts) if is_fresh else ()
        parts = self.who, self.at, self.life, self.looked, self.asked, founder._tried
        told = tuple(sorted((n, _told(k)) for n, k in self.answers.items()))
        return *parts, heard, known.life, str(known.offer), tuple(sorted(calls)), told


def _told(known: Known | None) -> tuple[object, ...]:
    if known is None:
        return ()
    return known.life, known.job, known.contacts, str(known.offer), known.waiting


class Naming:
    """The nodes, the links that are cut, and the lives that have begun, with their members."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.cut: set[tuple[str, str]] = set()
        self.members: dict[int, set[str]] = {}
        self.chosen: dict[int, tuple[str, ...]] = {}
        self.starts: dict[str, int] = {}
        self.lives = 0

    def fork(self) -> "Naming":
        """Copy it: what is frozen is shared."""
        new = copy.copy(self)
        new.cut, new.chosen = {*self.cut}, {**self.chosen}
        new.members = {life: {*names} for life, names in self.members.items()}
        new.nodes = {}
        for key, node in self.nodes.items():
            other = new.nodes[key] = copy.copy(node)
            other.name = copy.copy(node.name)
            other.name._asked_s = {**node.name._asked_s}
            other.founder = new._founder(node.who, key)
            other.founder._seen = copy.deepcopy(node.founder._seen)
            other.founder._tried, other.founder.offer = node.founder._tried, node.founder.offer
            other.answers = {**node.answers}
        return new

    def _founder(self, who: str, name: str) -> NamedFounder:
        call = LastCall(LEAST, len(NAMES), last_call_s=0.0, fits=lambda nodes: True)
        return NamedFounder(who, name, NAMES, call, draw_life=self._draw)

    def _draw(self) -> int:
        self.lives += 1
        return self.lives

    @property
    def is_far(self) -> bool:
        """True if enough lives have begun."""
        return self.lives >= MOST_LIVES

    def mark(self) -> tuple[object, ...]:
        """All that may matter for what happens next."""
        nodes = tuple((name, node.mark()) for name, node in sorted(self.nodes.items()))
        members = tuple((life, tuple(sorted(m))) for life, m in sorted(self.members.items()))
        return nodes, tuple(sorted(self.cut)), members

    def hears(self, one: str, other: str) -> bool:
        """True if nothing is cut between them."""
        return (min(one, other), max(one, other)) not in self.cut

    # ---- moves --------------------------------------------------------------------------------

    def usual(self) -> Iterator[str]:
        """List what may happen next without any fault."""
        for name in NAMES:
            node = self.nodes.get(name)
            if node is None:
                yield f"start {name}"
            elif node.at == "waits":
                yield f"ask {name}" if node.asked < len(NAMES) - 1 else f"decide {name}"
            elif node.at == "joins":
                yield f"enter {name}"
        for life, who in self.chosen.items():
            if life not in self.members and self._all_there(life, who):
                yield f"meet {life}"
        for life, members in self.members.items():
            for name in NAMES if members else ():
                if self._is_news(life, name):
                    yield f"renew {life} {name}"

    def faults(self) -> Iterator[str]:
        """List what may go wrong next, or be mended."""
        for name, node in sorted(self.nodes.items()):
            yield f"kill {name}"
            if node.name._asked_s or node.name._known.contacts:
                yield f"age {name}"
            if node.at in ("in", "meets"):
                yield f"{'leave_out' if node.at == 'in' else 'give_up'} {name}"
        for one in NAMES:
            for other in NAMES:
                if one < other:
                    yield (
                        f"sunder {one} {other}" if self.hears(one, other) else f"mend {one} {other}"
                    )

    def make(self, move: str) -> None:
        """Make a move in place; raises AssertionError where a rule is broken."""
        kind, *words = move.split()
        getattr(self, f"_{kind}")(*words)

    def _start(self, name: str) -> None:
        number = self.starts.get(name, 0)
        self.starts = {**self.starts, name: number + 1}
        who = f"{name}{number}"
        self.nodes[name] = Node(who, Name(PROGRAM), self._founder(who, name))

    def _ask(self, name: str) -> None:
        """Ask the next one of the others."""
        node = self.nodes[name]
        other = [one for one in NAMES if one != name][node.asked]
        node.asked += 1
        there = self.nodes.get(other)
        if self.hears(name, other):
            question = Call(who=node.who, program=digest_of(PROGRAM))
            node.answers[other] = None if there is None else there.name.hear(question, there.now_s)

    def _decide(self, name: str) -> None:
        node = self.nodes[name]
        node.answers[name] = node.name.hear(Own(), node.now_s)
        now_s = OVER_S + 1.0 if node.looked else 0.0
        decision = node.founder.decide(node.answers, now_s, address=name, scripts_port=1)
        node.looked, node.answers, node.asked = True, {}, 0
        if not isinstance(decision, Start | Join):
            return
        offer = node.founder.offer
        is_ours = offer is not None and offer.life == decision.life
        node.name.hear(Own(life=decision.life, offer=offer if is_ours else None), node.now_s)
        node.life = decision.life
        node.at = "meets" if isinstance(decision, Start) else "joins"
        if is_ours and offer is not None:
            self.chosen[offer.life] = offer.chosen

    def _wait(self, name: str) -> None:
        node = self.nodes[name]
        node.name.hear(Own(), node.now_s)
        node.at, node.life = "waits", 0

    def _give_up(self, name: str) -> None:
        self._wait(name)

    def _enter(self, name: str) -> None:
        """Be let in by a member that answers, or wait again."""
        node = self.nodes[name]
        members = self.members.get(node.life, set())
        if any(self.hears(name, one) for one in members):
            node.at = "in"
            members.add(name)
        else:
            self._wait(name)

    def _all_there(self, life: int, who: tuple[str, ...]) -> bool:
        there = {
            node.who for node in self.nodes.values() if (node.at, node.life) == ("meets", life)
        }
        return there >= {*who}

    def _meet(self, number: str) -> None:
        life = int(number)
        others = {old: names for old, names in self.members.items() if names}
        assert not others, f"life {life} begins, and {others} lives"
        self.members[life] = set()
        for name, node in self.nodes.items():
            if node.who in self.chosen[life]:
                node.at = "in"
                self.members[life].add(name)

    def _renew(self, life: str, name: str) -> None:
        members = self.members[int(life)]
        node = self.nodes.get(name)
        if node is not None and self.hears(min(members), name):
            contacts = tuple(sorted(members))
            node.name.hear(Renewal(life=int(life), contacts=contacts), node.now_s)

    def _is_news(self, life: int, name: str) -> bool:
        """Return whether a renewal would change what a name knows."""
        after = self.fork()
        after._renew(str(life), name)
        return after.mark() != self.mark()

    def _age(self, name: str) -> None:
        node = self.nodes[name]
        node.now_s += GONE_S + 1.0
        node.name.hear(Own(life=node.life, offer=node.name._known.offer), node.now_s)

    def _kill(self, name: str) -> None:
        del self.nodes[name]
        for members in self.members.values():
            members.discard(name)

    def _leave_out(self, name: str) -> None:
        self.members[self.nodes[name].life].discard(name)
        self._wait(name)

    def _sunder(self, one: str, other: str) -> None:
        self.cut.add((one, other))

    def _mend(self, one: str, other: str) -> None:
        self.cut.discard((one, other))

    def come_to_rest(self) -> None:
        """Have all links mended and all nodes started, and each do its usual moves in turn."""
        self.cut.clear()
        for number in range(_ROUNDS):
            for name in self.nodes if number % 4 == 0 else ():
                self._age(name)
            for name in NAMES:
                if name not in self.nodes:
                    self._start(name)
                while (node := self.nodes[name]).at == "waits" and node.asked < len(NAMES) - 1:
                    self._ask(name)
                if node.at == "waits":
                    self._decide(name)
            self._meet_or_enter(patient=number % 4 > 0)
            for life, members in self.members.items():
                for name in NAMES if members else ():
                    self._renew(str(life), name)
        lives = {node.life for node in self.nodes.values() if node.at == "in"}
        states = [(name, node.at, node.life) for name, node in self.nodes.items()]
        assert len(lives) == 1 and len(self.nodes) == len(NAMES), states
        assert all(node.at == "in" for node in self.nodes.values()), states

    def _meet_or_enter(self, *, patient: bool) -> None:
        for life, who in self.chosen.items():
            if life not in self.members and self._all_there(life, who):
                self._meet(str(life))
        for name, node in self.nodes.items():
            if node.at == "joins":
                self._enter(name)
            elif node.at == "meets" and not patient:
                self._wait(name)  # somebody does not come


def explore_names(**more: Any) -> Found:
    """Visit each state once, as `visit` does.

    Two lives never live at the same time; and from one state in `share` all nodes come to one job.
    """
    return visit(Naming(), **more)


def walk(seed: int, *, moves: int = 300, fault: float = 0.08) -> int:
    """Make random moves, of which this part are faults; raises Broken; returns how many lives."""
    draw, naming, path = random.Random(seed), Naming(), tuple[str, ...]()
    for _ in range(moves):
        usual, faults = [*naming.usual()], [*naming.faults()]
        move = draw.choice(faults if faults and (not usual or draw.random() < fault) else usual)
        act(naming.make, move, path)
        path = (*path, move)
    come_to_rest(naming, path)
    return len(naming.members)
