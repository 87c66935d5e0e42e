"""Finds out whether the own trainer hangs, with what the other supervisors say about theirs.

The beats carry it. Each supervisor tells the leader when its trainer stands still and which worker
it waits for; the leader tells each supervisor which workers wait for its trainer. That supervisor
decides, since it alone sees the page of its trainer as it is now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Protocol

from elaswave_plugin.core.agreement.hang import (
    STOPPED_LIMIT_S,
    Sample,
    Waiting,
    limit_of,
    verdict,
    who_waits,
    with_native_waits,
)
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.errors import EXIT_CONFIGURATION
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import Beat
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.tracking.events import EventLog

_SHORTEST_PAUSE_S = 0.05
# A page that has not changed for this part of the time between beats is worth telling.
_STILL = 0.25
# Beats for which the word of the leader counts.
_BEATS_VALID = 3


class Trainer(Protocol):
    """The operations that the watch asks of the supervisor."""

    def progress(self, awake_s: float) -> Sample | None: ...

    def fence(self, evidence: str) -> None: ...


class HangWatch:
    """One supervisor's part; `every_s` is the time between beats.

    `unheard()`: slots of which nothing comes to this machine.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        agreement: Agreement,
        trainer: Trainer,
        events: EventLog,
        unheard: Callable[[], tuple[int, ...]] = tuple,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor = reactor
        self._agreement = agreement
        self._trainer = trainer
        self._events = events
        self._unheard = unheard
        self._every_s = every_s
        self._still_s = _STILL * every_s
        self._clock = clock
        self._others: dict[int, Sample] = {}
        self._told = Waiting()
        self._told_s = 0.0
        self._waiting: dict[int, Waiting] = {}
        self._awake_s = self._due_s = clock()
        self._fenced: Sample | None = None
        self._told_held = -1, -1, ""
        self._check()

    # ---- what the beats carry -----------------------------------------------------------------

    def begin_beat(self) -> None:
        """The beats that follow are of one moment."""
        own = self._progress()
        is_told = own is not None and (own.entered or own.stalled_s >= self._still_s)
        self._told_own = own if is_told else None
        self._waiting = self._who_waits(self._told_own) if self._leads else {}

    @property
    def page(self) -> Sample | None:
        """The own trainer's stall, for another supervisor that leads and has to know it.

        Where it has native communicators, at any time: others may wait for it in one.
        """
        return None if self._leads else self._told_own

    def waiting_for(self, peer: int) -> Waiting:
        """Return the workers that wait for another supervisor's, as far as the leader knows."""
        return self._waiting.get(peer, Waiting())

    def heard(self, peer: int, beat: Beat) -> None:
        """A beat came from another supervisor."""
        self._others.pop(peer, None)
        if beat.page is not None:
            self._others[peer] = beat.page
        if peer == self._agreement.leader:
            self._told, self._told_s = beat.waiting, self._clock()

    @property
    def pages(self) -> dict[int, Sample]:
        """Those of the workers that stand still, as this supervisor has heard of them."""
        return with_native_waits(self._known(self._told_own), still_s=self._still_s)

    # ---- inside -------------------------------------------------------------------------------

    def _progress(self) -> Sample | None:
        own = self._trainer.progress(self._awake_s)
        if own is None or own.stalled_s < self._still_s:
            return own
        return replace(own, unheard=self._unheard())

    @property
    def _leads(self) -> bool:
        return self._agreement.leader == self._agreement.slot

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

    def _who_waits(self, own: Sample | None) -> dict[int, Waiting]:
        members = self._members()
        known = (one for one in self._known(own) if self._takes_part(one, members))
        samples = with_native_waits(known, still_s=self._still_s)
        return who_waits(sorted({slot for slot, _ in members}), samples)

    def _known(self, own: Sample | None) -> list[Sample]:
        return [*self._others.values(), *([] if own is None else [own])]

    def _check(self) -> None:
        now_s = self._clock()
        if now_s - self._due_s > self._every_s:
            # It is this process that did not run, and so maybe the whole machine or job.
            self._awake_s = now_s
        own = self._progress()
        pause_s = self._every_s
        if own is not None and not self._takes_part(own, self._members()):
            self._judge_newcomer(own)
        elif own is not None:
            if own.is_late_in_circle or own.is_held:
                self._judge(own)
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
            self._trainer.fence(
                f"stopped by a signal for {own.stopped_s:.1f} s (limit {STOPPED_LIMIT_S:g} s)"
                " before it entered the job"
            )

    def _judge(self, own: Sample) -> None:
        if self._leads:
            waiting = self._who_waits(own).get(own.slot, Waiting())
        else:
            fresh = self._clock() - self._told_s < _BEATS_VALID * self._every_s
            waiting = self._told if fresh else Waiting()
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
            self._trainer.fence(evidence)

    def _found(self, own: Sample, waiting: Waiting) -> None:
        self._fenced = own
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
        if where != self._told_held:
            self._told_held = where
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
        return self._fenced is not None and self._fenced.incarnation == own.incarnation
