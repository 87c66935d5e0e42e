"""The start of a job by nodes that know a list of names: found, join, end, without a record (pure).

Each listed name tells what it knows of the job for as long as its process lives; nothing else
remembers. A node that waits asks all names again and again, and joins the job that it hears of. It
founds one only after each name has answered that it knows of none, or nobody is there: one that is
silent may be part of a job. The job trains only while enough names are part of it, which are more
than half of several; they renew its lease together. A name founds nothing before the leases have
run out that it may have renewed before its process was started again.

Each node of a launch has looked for itself, and meets the others only then. So of two jobs one has
no name left: a name of both, which there is, has heard of the first before it met for the second.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elaswave_plugin.core.agreement.founding import (
    AGAIN,
    GONE_S,
    OVER_S,
    Decision,
    End,
    Join,
    LastCall,
    Seen,
    Start,
    Wait,
)
from elaswave_plugin.core.codec import WireMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(WireMessage):
    """A node that waits asks what is known: `who` it is, in this life of its process.

    `program`: the digest of what it runs.
    """

    who: str
    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The nodes with which a founder begins a life, by rank, and where they meet."""

    life: int
    chosen: tuple[str, ...]
    address: str
    scripts_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(WireMessage):
    """The node of a name says which life of the job it is part of; 0: it waits.

    `offer`: of a life that it founds.
    """

    life: int = 0
    offer: Offer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal(WireMessage):
    """The agent that leads a life renews its lease, and names agents of the job."""

    life: int
    contacts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(WireMessage):
    """An agent of a life tells that the job has ended."""

    life: int
    exit_code: int


Question = Call | Own | Renewal | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The answer of a name: what `Own` says of its node, and the agents of the job that it knows.

    `program`: what its node runs; `job`: the life that `contacts` are agents of; `waiting`: the
    nodes that ask it, told to its own node alone.
    """

    program: Mapping[str, Any] = field(default_factory=dict)
    life: int = 0
    job: int = 0
    contacts: tuple[str, ...] = ()
    offer: Offer | None = None
    exit_code: int | None = None
    waiting: tuple[str, ...] = ()


class Name:
    """A listed name: what it knows, by what it is told."""

    def __init__(self, program: Mapping[str, Any]) -> None:
        self._digest = digest(program)
        self._known = Known(program=program)
        self._renewed_s = float("-inf")
        self._asked_s: dict[str, float] = {}

    def hear(self, question: Question, now_s: float) -> Known:
        """Note what a question tells, and answer it."""
        if now_s - self._renewed_s > GONE_S:  # its agents may be others by now, or none
            self._known = replace(self._known, job=0, contacts=())
        match question:
            case Call():
                if question.program == self._digest:
                    self._asked_s[question.who] = now_s
            case Own(life=life, offer=offer):
                self._known = replace(self._known, life=life, offer=offer, exit_code=None)
                return replace(self._known, waiting=self._waiting(now_s))
            case Renewal(life=life, contacts=contacts):
                # A name that has forgotten its job hears of it so.
                if self._known.life in (0, life):
                    self._renewed_s = now_s
                    self._known = replace(self._known, job=life, contacts=contacts)
            case Ended(life=life, exit_code=code):
                if self._known.life == life:
                    self._known = replace(self._known, exit_code=code)
        return self._known

    def _waiting(self, now_s: float) -> tuple[str, ...]:
        """Those that have asked lately: one that asks no more is gone."""
        self._asked_s = {w: at_s for w, at_s in self._asked_s.items() if now_s - at_s <= GONE_S}
        return tuple(self._asked_s)


def digest(program: Mapping[str, Any]) -> str:
    """Return a text by which two programs can be compared."""
    return hashlib.sha256(json.dumps(program, sort_keys=True).encode()).hexdigest()


class NamedFounder:
    """One node's part: `decide` by the answers of all names, again and again.

    `who`: of this node, in this life of its process; `own`: its name, "" for a node without one;
    `names`: all of them. `draw_life()`: a number that no life has had.
    """

    def __init__(
        self,
        who: str,
        own: str,
        names: Sequence[str],
        last_call: LastCall,
        *,
        draw_life: Callable[[], int],
    ) -> None:
        self._who = who
        self._own = own
        self._names = tuple(names)
        self._last_call = last_call
        self._draw_life = draw_life
        self._seen = Seen()
        # The last life that was tried, and what this node has offered for it.
        self._tried = 0
        self.offer: Offer | None = None

    def decide(
        self,
        answers: Mapping[str, Known | None],
        now_s: float,
        *,
        address: str,
        scripts_port: int,
    ) -> Decision:
        """Decide by these answers; None: nobody is there; a name that is left out was silent.

        `address`: where the others reach this node, if it founds; `scripts_port`: another port.
        """
        age_s = self._seen.still_s("began", True, now_s)
        known = {name: one for name in self._names if (one := answers.get(name)) is not None}
        for one in known.values():
            if one.exit_code is not None and one.exit_code not in AGAIN:
                return End(one.exit_code)
        for one in known.values():
            if one.contacts:
                return Join(one.job, one.contacts)
        if silent := [name for name in self._names if name not in answers]:
            return Wait(f"{', '.join(silent)} to answer, where the job may be known")
        offers = {one.offer.life: one.offer for one in known.values() if one.offer is not None}
        if {one.life for one in known.values() if one.life} - offers.keys() or len(offers) > 1:
            return Wait("the job to start")
        for offer in offers.values():
            return self._follow(offer)
        if not known:
            return Wait(f"a process to listen at {', '.join(self._names)}")
        first = next(iter(known))
        if first != self._own:
            return Wait(f"the nodes that {first} counts")
        return self._found(known[first].waiting, age_s, now_s, address, scripts_port)

    def left(self) -> None:
        """Note that this node was part of a life until now: it has renewed leases of that."""
        self._seen = Seen()

    def _follow(self, offer: Offer) -> Decision:
        """Go where a founder waits, if it has chosen this node; once for each life."""
        if self._who not in offer.chosen or offer.life == self._tried:
            return Wait("the nodes that were chosen to start the job")
        self._tried = offer.life
        rank, nodes = offer.chosen.index(self._who), len(offer.chosen)
        return Start(offer.life, rank, nodes, offer.address, offer.scripts_port)

    def _found(
        self, waiting: Sequence[str], age_s: float, now_s: float, address: str, scripts_port: int
    ) -> Decision:
        others = [who for who in waiting if who != self._who]
        count = self._last_call.enough(1 + len(others), self._tried, now_s)
        if not count:
            return self._last_call.wait(1 + len(others))
        if age_s <= OVER_S:
            return Wait("leases to run out that this name may have renewed")
        self._tried = self._draw_life()
        chosen = (self._who, *others)[:count]
        self.offer = Offer(
            life=self._tried, chosen=chosen, address=address, scripts_port=scripts_port
        )
        return Start(self._tried, 0, count, address, scripts_port)


class LostLifeError(Exception):
    """Enough names are part of another life of the job: this one is over."""


def renews(answers: Iterable[Known | None], life: int, wanted: int) -> bool:
    """Return whether enough names are part of a life, so that its lease is renewed.

    Raises LostLifeError where they are part of another one.
    """
    parts = Counter(one.life for one in answers if one is not None and one.life)
    if parts[life] >= wanted:
        return True
    if any(count >= wanted for count in parts.values()):
        raise LostLifeError
    return False
