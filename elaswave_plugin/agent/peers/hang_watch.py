"""Finds out whether a trainer of this node hangs, with what other agents say about theirs.

The beats carry it. Each agent tells the leader which of its trainers stand still and which worker
each waits for; the leader tells each agent which workers wait for its trainers. That agent decides,
since it alone sees the pages of its trainers as they are now. Before anything counts as a hang, the
leader says which worker all others wait for, for how long, and where that one is.
"""

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Thread
from typing import Protocol

from elaswave_plugin.core.agreement.hang import (
    AllWait,
    Said,
    Sample,
    Waiting,
    all_wait,
    limit_of,
    verdict,
    who_waits,
    with_native_waits,
)
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.limits import STOPPED_LIMIT_S
from elaswave_plugin.core.agreement.messages import Fence, Order
from elaswave_plugin.errors import EXIT_CONFIGURATION
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import Beat
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.tracking.events import EventLog

_ASK_S = 8.0
_MOST_NAMED = 4


class WaitWatch:
    """Says which worker all others wait for; only an agent that leads hears of all workers.

    The awaited worker's own agent knows where in its program that is. It is asked in a thread,
    since that takes long.
    """

    def __init__(self, agreement: Agreement, events: EventLog, secret: Secret) -> None:
        self._agreement = agreement
        self._events = events
        self._secret = secret
        self._said = Said()

    def look(self, pages: Mapping[int, Sample]) -> None:
        """Say it where it is due; ``pages``: those of the workers that stand still."""
        view = self._agreement.committed
        members = dict(zip(view.ranks, view.incarnations, strict=True))
        samples = {
            slot: page for slot, page in pages.items() if members.get(slot) == page.incarnation
        }
        found = all_wait(members, samples)
        if self._said.is_due(found, time.monotonic()):
            assert found is not None
            address = self._agreement.addresses[self._node_of(found.late[0])]
            what = self._described(found, samples.get(found.late[0]))
            ask = Thread(target=self._tell, args=(found, address, what), name="where", daemon=True)
            ask.start()

    def _node_of(self, slot: int) -> int:
        return self._agreement.nodes.of_slots[slot]

    def _described(self, found: AllWait, page: Sample | None) -> str:
        nodes = [f"{slot} (node {self._node_of(slot)})" for slot in found.late[:_MOST_NAMED]]
        more = len(found.late) - len(nodes)
        who = f"worker{'s' if len(found.late) > 1 else ''} {', '.join(nodes)}"
        who += f" and {more} more" if more else ""
        if page is None and not self._agreement.committed.epoch:
            where = "not attached yet"
        elif page is None:
            where = "at work"
        elif not self._agreement.started and page.phase == BETWEEN_STEPS:
            where = "before the first step"
        else:
            where = f"{page.phase} of step {page.step}"
        return f"all others wait for {who}, for {found.waited_s:.0f} s: {where}"

    def _tell(self, found: AllWait, address: str, what: str) -> None:
        try:
            asked = {"t": "where", "slot": found.late[0]}
            line = request(address, asked, _ASK_S, self._secret)["line"]
        except OSError:
            line = None
        say(what if line is None else f"{what}, in {line}")
        self._events.emit("all_wait", slots=list(found.late), waited_s=found.waited_s, line=line)


_SHORTEST_PAUSE_S = 0.05
# A page that has not changed for this part of the time between beats is worth telling.
_STILL = 0.25
# Beats for which the word of the leader counts.
_BEATS_VALID = 3


class Trainers(Protocol):
    """The trainers of this node."""

    def progress(self, awake_s: float) -> list[Sample]:
        """Return how far those are that work; time before ``awake_s`` does not count."""

    def carry_out(self, order: Order) -> None:
        """Do what the agreement orders."""


class HangWatch:
    """One agent's part; `every_s` is the time between beats.

    `unheard()`: slots of which nothing comes to this machine.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        agreement: Agreement,
        trainers: Trainers,
        events: EventLog,
        unheard: Callable[[], tuple[int, ...]] = tuple,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor = reactor
        self._agreement = agreement
        self._trainers = trainers
        self._events = events
        self._unheard = unheard
        self._every_s = every_s
        self._still_s = _STILL * every_s
        self._clock = clock
        # By node, those of its trainers that stand still.
        self._others: dict[int, tuple[Sample, ...]] = {}
        self._told: Mapping[int, Waiting] = {}
        self._told_s = 0.0
        self._told_own: list[Sample] = []
        self._waiting: dict[int, Waiting] = {}
        self._awake_s = self._due_s = clock()
        # What was found of each slot: the incarnation that is being ended, what was said of it.
        self._fenced: dict[int, int] = {}
        self._told_held: dict[int, tuple[int, int, str]] = {}
        self._check()

    # ---- what the beats carry -----------------------------------------------------------------

    def begin_beat(self) -> None:
        """The beats that follow are of one moment."""
        self._told_own = [
            own for own in self._progress() if own.entered or own.stalled_s >= self._still_s
        ]
        self._waiting = self._who_waits(self._told_own) if self._leads else {}

    def pages_for(self, node: int) -> tuple[Sample, ...]:
        """The own trainers' stalls, for an agent that leads and has to know them.

        Where they have native communicators, at any time: others may wait for them in one.
        """
        return () if self._leads else tuple(self._told_own)

    def waiting_for(self, node: int) -> dict[int, Waiting]:
        """Return the workers that wait for those of a node, as far as the leader knows."""
        slots = self._agreement.nodes.slots_of(node)
        return {slot: self._waiting[slot] for slot in slots if slot in self._waiting}

    def heard(self, node: int, beat: Beat) -> None:
        """A beat came from another agent."""
        self._others[node] = beat.pages
        if node == self._agreement.leader:
            self._told, self._told_s = beat.waiting, self._clock()

    @property
    def pages(self) -> dict[int, Sample]:
        """Those of the workers that stand still, as this agent has heard of them."""
        return with_native_waits(self._known(self._told_own), still_s=self._still_s)

    # ---- inside -------------------------------------------------------------------------------

    def _progress(self) -> list[Sample]:
        found = self._trainers.progress(self._awake_s)
        if all(own.stalled_s < self._still_s for own in found):
            return found
        unheard = self._unheard()
        still = self._still_s
        return [own if own.stalled_s < still else replace(own, unheard=unheard) for own in found]

    @property
    def _leads(self) -> bool:
        return self._agreement.leader == self._agreement.node

    def _members(self) -> set[tuple[int, int]]:
        """Return slot and incarnation of each worker of the view and of the one that is proposed.

        The others may wait for a newcomer to answer that.
        """
        proposed = self._agreement.proposed
        views = (self._agreement.committed, *(() if proposed is None else (proposed,)))
        return {one for view in views for one in zip(view.ranks, view.incarnations, strict=True)}

    def _takes_part(self, sample: Sample, members: Container[tuple[int, int]]) -> bool:
        """Return whether others may wait for it; what a script does at first may take hours."""
        has_begun = self._agreement.started or sample.is_stopped or sample.phase != BETWEEN_STEPS
        return has_begun and (sample.slot, sample.incarnation) in members

    def _who_waits(self, own: Iterable[Sample]) -> dict[int, Waiting]:
        members = self._members()
        known = (one for one in self._known(own) if self._takes_part(one, members))
        samples = with_native_waits(known, still_s=self._still_s)
        return who_waits(sorted({slot for slot, _ in members}), samples)

    def _known(self, own: Iterable[Sample]) -> list[Sample]:
        lives = self._agreement.nodes.lives
        others = (pages for node, pages in self._others.items() if lives(node))
        return [*(one for pages in others for one in pages), *own]

    def _check(self) -> None:
        now_s = self._clock()
        if now_s - self._due_s > self._every_s:
            # It is this process that did not run, and so maybe the whole machine or job.
            self._awake_s = now_s
        members = self._members()
        found = self._progress()
        pause_s = self._every_s
        for own in found:
            if not self._takes_part(own, members):
                self._judge_newcomer(own)
                continue
            if own.is_late_in_circle or own.is_held:
                self._judge(own, found)
            may_stall_s = own.may_stall_s if own.is_late_in_circle else own.may_stall_in_circle_s
            left_s = may_stall_s - own.stalled_s
            if own.stopped_s is not None:
                left_s = min(left_s, STOPPED_LIMIT_S - own.stopped_s)
            pause_s = max(_SHORTEST_PAUSE_S, min(pause_s, left_s))
        self._due_s = self._clock() + pause_s
        self._reactor.after(pause_s, self._check)

    def _judge_newcomer(self, own: Sample) -> None:
        """Give up one that a signal has stopped on its way in: nobody else would ask for it."""
        is_late = (own.stopped_s or 0.0) >= STOPPED_LIMIT_S and self._agreement.started
        if is_late and own.incarnation and not self._is_fenced(own):
            self._found(own, Waiting())
            why = (
                f"stopped by a signal for {own.stopped_s:.1f} s (limit {STOPPED_LIMIT_S:g} s)"
                " before it entered the job"
            )
            self._trainers.carry_out(Fence(slot=own.slot, evidence=why))

    def _judge(self, own: Sample, found: Sequence[Sample]) -> None:
        """Decide on a trainer that is late; ``found``: all of this node."""
        if self._leads:
            waiting = self._who_waits(found).get(own.slot, Waiting())
        else:
            fresh = self._clock() - self._told_s < _BEATS_VALID * self._every_s
            waiting = self._told.get(own.slot, Waiting()) if fresh else Waiting()
        evidence = verdict(own, waiting)
        if evidence is None or self._is_fenced(own):
            if own.is_held and waiting.slots:
                self._tell_held(own, waiting)
            return
        self._found(own, waiting)
        came = any(self._agreement.committed.incarnations)
        if waiting.differs and waiting.by_script and not came:
            # Work that only some ask for: the next one to do so would be at fault, too.
            self._agreement.abandon(f"worker {own.slot}: {evidence}", EXIT_CONFIGURATION)
        else:
            self._trainers.carry_out(Fence(slot=own.slot, evidence=evidence))

    def _found(self, own: Sample, waiting: Waiting) -> None:
        self._fenced[own.slot] = own.incarnation
        self._events.emit(
            "hang_found",
            slot=own.slot,
            step=own.step,
            phase=own.phase,
            stalled_s=own.stalled_s,
            limit_s=limit_of(own, waiting),
            waited_s=own.waited_s,
            stopped=own.is_stopped,
            waiting=list(waiting.slots),
            in_circle=waiting.in_circle,
            differs=waiting.differs,
            apart=waiting.apart,
        )

    def _tell_held(self, own: Sample, waiting: Waiting) -> None:
        """Say once a phase that it stays: SIGKILL would neither end it nor free its device."""
        where = own.incarnation, own.step, own.phase
        if where != self._told_held.get(own.slot):
            self._told_held[own.slot] = where
            self._events.emit(
                "held_in_kernel",
                slot=own.slot,
                step=own.step,
                phase=own.phase,
                held_s=own.in_kernel_s,
                waiting=list(waiting.slots),
            )
            say(
                f"worker {own.slot} has been in a call of the kernel's that no signal ends (state"
                f" D) for {own.in_kernel_s:.1f} s, in {own.phase} of step {own.step}: a file system"
                f" or a device does not answer; {waiting}, and the job with them; set"
                " uninterruptible_timeout_s to give such a worker up"
            )

    def _is_fenced(self, own: Sample) -> bool:
        """The signal is on its way."""
        return self._fenced.get(own.slot) == own.incarnation
