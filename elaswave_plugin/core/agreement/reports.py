"""The agents' reports on their trainers, as one of them knows them (pure)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Detached,
    Done,
    FirstSeal,
    News,
    Notice,
    Raised,
    Ready,
    Replan,
    Report,
    Settled,
    Severed,
    Starts,
)
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import (
    Arrival,
    FailureEvent,
    MembershipView,
    WorkerId,
    grown_view,
    next_view,
)


class Reports:
    """All news that still counts. ``changes`` rises with each that may ask for another view."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.failures: dict[WorkerId, Report] = {}
        self.done: dict[int, int | None] = {}
        # Where in the training workers have finished, in words.
        self.finished_at: set[str] = set()
        self.arrivals: dict[int, Arrival] = {}
        self.notices: dict[WorkerId, str] = {}
        self.saves_last: set[WorkerId] = set()
        self.asked: set[WorkerId] = set()
        self.sealed: set[int] = set()
        self.settled: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        self.started = False
        # Set if trainers work outside the job: what they lack, as the first of them says.
        self.lacking: str | None = None
        self.severed: tuple[str, float] | None = None
        self.replan: str | None = None
        self.changes = 0
        self._told: set[tuple[str, str, str]] = set()
        self._timeouts = timeouts
        # When workers that were told to leave do so; and whether that time has come.
        self.leave_at_s: float | None = None
        self.leaving = False

    def learn(self, news: News, *, epoch: int, now_s: float) -> None:
        """Take in what an agent tells of its trainers; ``epoch``: the newest committed one.

        News in a promise is taken in late, after newer news.
        """
        match news:
            case Report():
                self._add_failure(news, now_s)
            case Severed():
                if self.severed is None and news.epoch == epoch:
                    self.severed = news.evidence, now_s + self._timeouts.link_grace_s
            case Replan():
                # A newer view has fulfilled an older one.
                if news.epoch == epoch:
                    self.changes += self.replan is None
                    self.replan = news.reason
            case FirstSeal():
                self.sealed.add(news.slot)
            case AllSealed():
                self.started = True
            case Done():
                self.changes += news.slot not in self.done
                self.finished_at.add(news.when)
                if self.done.get(news.slot) is None:
                    self.done[news.slot] = news.exit_code
            case Ready():
                worker, slot = news.arrival.worker, news.arrival.worker.slot
                is_last = worker.incarnation >= self.incarnations.get(slot, 0)
                if is_last and worker not in self.failures:
                    self.changes += self.arrivals.get(slot) != news.arrival
                    self.arrivals[slot] = news.arrival
            case Settled():
                self.settled[news.slot] = news.epoch
            case Detached():
                if self.lacking is None:
                    self.lacking = news.missing
            case Starts():
                known = self.incarnations.get(news.worker.slot, 0)
                self.incarnations[news.worker.slot] = max(known, news.worker.incarnation)
            case Notice():
                self.changes += news.worker not in self.notices
                self.notices.setdefault(news.worker, news.evidence)
                if self.leave_at_s is None and not self.leaving:
                    self.leave_at_s = now_s + self._timeouts.gather_s
                if news.saves_last:
                    self.saves_last.add(news.worker)
                if news.asked:
                    self.asked.add(news.worker)

    def untold(self) -> list[tuple[WorkerId, Raised]]:
        """Return the failures of scripts to show: each once, as workers may fail alike."""
        self._told &= {one.raised.key for one in self.failures.values() if one.raised is not None}
        new = []
        for worker, report in self.failures.items():
            if report.raised is not None and report.raised.key not in self._told:
                self._told.add(report.raised.key)
                new.append((worker, report.raised))
        return new

    def _add_failure(self, report: Report, now_s: float) -> None:
        failure, worker = replace(report.failure, detected_at_s=now_s), report.failure.worker
        if worker not in self.failures:
            # Stamp it with this clock: the clocks of two nodes need not agree.
            self.failures[worker] = replace(report, failure=failure)
            self.changes += 1
        waiting = self.arrivals.get(failure.slot)
        if waiting is not None and waiting.worker == worker:
            del self.arrivals[failure.slot]

    def pass_time(self, view: MembershipView, now_s: float) -> None:
        """Note what has become due by the passing of time."""
        if self.leave_at_s is not None and now_s >= self.leave_at_s:
            # A new leader is also told of workers that left long ago.
            told = any(worker in view for worker in self.notices)
            self.leave_at_s, self.leaving = None, told

    def entered(self, view: MembershipView) -> None:
        """Enter a committed view: its members wait no more."""
        self.severed = self.replan = None
        if not any(worker in view for worker in self.notices):
            self.leave_at_s, self.leaving = None, False
        for slot, waiting in list(self.arrivals.items()):
            if waiting.worker in view:
                del self.arrivals[slot]
        for worker in view.workers:
            if worker.incarnation > self.incarnations.get(worker.slot, 0):
                self.incarnations[worker.slot] = worker.incarnation
        for told in (self.failures, self.notices):
            for worker in [one for one in told if self.is_past(one, view)]:
                del told[worker]
        self.saves_last &= self.notices.keys()
        self.asked &= self.notices.keys()

    def take_back(self, worker: WorkerId, view: MembershipView) -> str:
        """Let a worker stay that was told to leave; return why it was told."""
        self.saves_last.discard(worker)
        self.asked.discard(worker)
        evidence = self.notices.pop(worker)
        self.leaving = any(one in view for one in self.notices)
        return evidence

    def is_past(self, worker: WorkerId, view: MembershipView) -> bool:
        """Return whether a worker is not in a committed view and cannot be in a later one."""
        return worker not in view and worker.incarnation < self.incarnations.get(worker.slot, 0)

    def replaced(self, worker: WorkerId) -> None:
        """Give a slot to another node: requests of its earlier trainers are void."""
        self.arrivals.pop(worker.slot, None)
        self.settled.pop(worker.slot, None)
        self.incarnations[worker.slot] = worker.incarnation
        self.changes += 1

    def is_ending(self, view: MembershipView) -> bool:
        """Return whether no step begins any more: some have finished, or all have to leave."""
        return bool(self.done) or self.all_leave(view)

    def all_leave(self, view: MembershipView) -> bool:
        """Return whether every member of a view was told to leave, and none of them stays."""
        if view.epoch == 0 or not view.workers <= self.notices.keys():
            return False
        return self.asked.isdisjoint(view.workers) or view.workers <= self.saves_last

    def all_save_last(self, view: MembershipView) -> bool:
        """Return whether all members leave, write a last checkpoint, and end by themselves."""
        return self.all_leave(view) and view.workers <= self.saves_last

    def failed_in(self, view: MembershipView) -> list[Report]:
        """List the failures of members that had not finished their work, in order of arrival."""
        return [
            report
            for worker, report in self.failures.items()
            if worker in view and worker.slot not in self.done
        ]

    def failed_at_the_end(self) -> list[Report]:
        """List the failures by an exception where others have finished: no worker redoes that."""
        return [
            report
            for report in self.failures.values()
            if report.exit_code
            and report.raised is not None
            and report.raised.when in self.finished_at
            and report.failure.slot not in self.done
        ]

    def gone_from(self, view: MembershipView, lost: Iterable[int]) -> set[int]:
        """Return the slots of a view whose trainer or agent is gone."""
        failed = {worker.slot for worker in self.failures if worker in view}
        return failed | {slot for slot in lost if slot in view.by_slot}

    def events(
        self, view: MembershipView, lost: Mapping[int, str], now_s: float
    ) -> list[FailureEvent]:
        """List every failure, and a loss for each worker of the view that has no agent."""
        without = [
            event_of(view, slot, "lost", evidence, now_s)
            for slot, evidence in lost.items()
            if slot in view.by_slot
        ]
        return [*(report.failure for report in self.failures.values()), *without]

    def all_ended(self, view: MembershipView, lost: Iterable[int]) -> bool:
        """Return whether every worker of a view has itself told its end, and none is just lost."""
        told = self.gone_from(view, ()) | self.done.keys()
        return told.issuperset(view.ranks) and view.by_slot.keys().isdisjoint(lost)

    def all_settled(self, view: MembershipView) -> bool:
        """Return whether no member of a view needs what was sealed before it."""
        return all(self.settled.get(slot, 0) >= view.epoch for slot in view.ranks)

    def is_ready(self, worker: WorkerId, lost: Collection[int]) -> bool:
        """Return whether a newcomer still waits to be let in."""
        waiting = self.arrivals.get(worker.slot)
        return waiting is not None and waiting.worker == worker and worker.slot not in lost

    def waiting(self, lost: Collection[int]) -> list[Arrival]:
        """List the newcomers that wait to be let in."""
        return [one for slot, one in self.arrivals.items() if slot not in lost]

    def between_steps(
        self, view: MembershipView, lost: Collection[int], now_s: float
    ) -> MembershipView | None:
        """Return the view without leavers and with waiting newcomers; None: no change.

        If one of the members has a wish and nothing else changes: the same members again.
        """
        shrunk = next_view(view, self.departures(view, now_s), now_s)
        if shrunk is not None and not shrunk.ranks:
            shrunk = None  # somebody has to stay
        grown = grown_view(shrunk or view, self.waiting(lost))
        if shrunk is None or grown is None:
            same = None if self.replan is None else replace(view, reason=self.replan)
            return grown or shrunk or same
        return replace(grown, epoch=shrunk.epoch, reason=f"{shrunk.reason}; {grown.reason}")

    def departures(self, view: MembershipView, now_s: float) -> list[FailureEvent]:
        """List the members of a view that leave between two steps, once it is time."""
        if not self.leaving:
            return []
        return [
            event_of(view, worker.slot, "leave", evidence, now_s)
            for worker, evidence in self.notices.items()
            if worker in view
        ]


def event_of(
    view: MembershipView, slot: int, kind: str, evidence: str, now_s: float
) -> FailureEvent:
    """An event about the incarnation of ``slot`` that is in the view."""
    incarnation = dict(zip(view.ranks, view.incarnations, strict=True)).get(slot, 0)
    return FailureEvent(
        kind=kind, slot=slot, detected_at_s=now_s, evidence=evidence, incarnation=incarnation
    )
