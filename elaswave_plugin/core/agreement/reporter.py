"""The reports of a supervisor on its own trainer, and its knowledge of the others (pure).

The base of `agreement.Agreement`: news goes to the leader, and with a promise to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from elaswave_plugin.core.agreement.effects import Effect, Note, Send
from elaswave_plugin.core.agreement.messages import (
    Done,
    FirstSeal,
    Message,
    News,
    Notice,
    Raised,
    Ready,
    Replan,
    Report,
    Settled,
    Severed,
    Starts,
    Stays,
)
from elaswave_plugin.core.agreement.next_view import who_stays
from elaswave_plugin.core.agreement.quorum import Supervisors
from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import (
    Arrival,
    FailureEvent,
    MembershipView,
    WorkerId,
    first_view,
)


class Reporter:
    """One supervisor's trainer; `nodes[s]` is the node of slot s."""

    def __init__(self, *, slot: int, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        self.slot = slot
        self.timeouts = timeouts
        # The first two views of the job, and those that some member may not know.
        self.history = [first_view(nodes)]
        # As the own trainer has told it, in JSON; None in a data-parallel job.
        self.layout: Mapping[str, Any] | None = None
        self.over = False
        self.incarnation = 0
        self._supervisors = Supervisors(nodes)
        self._reports = Reports(timeouts)
        self._fence_at_s: float | None = None
        # True if it works without having joined; then nobody waits for it to join.
        self._detached = False
        self._news: list[News] = []
        self._effects: list[Effect] = []

    @property
    def committed(self) -> MembershipView:
        """The newest view known to be committed (epoch 0 before the first)."""
        return self.history[-1]

    @property
    def started(self) -> bool:
        """True if every trainer has sealed its first snapshot."""
        return self._reports.started

    @property
    def ending(self) -> bool:
        """True if no worker begins another step, as far as this supervisor knows."""
        return self.over or self._reports.is_ending(self.committed)

    @property
    def has_majority(self) -> bool:
        """True if the living supervisors that this one sees are on most nodes of the view."""
        return self._supervisors.minority_in(self._supervisors.living(), [self.committed]) is None

    @property
    def others_went_on(self) -> bool:
        """True if a view without the own trainer is settled: no earlier state is needed."""
        view = self.committed
        return self.slot not in view.ranks and self._reports.all_settled(view)

    @property
    def without_supervisor(self) -> dict[int, str]:
        """The slots without a supervisor, with the evidence of its loss."""
        return dict(self._supervisors.lost)

    @property
    def unused_node(self) -> int:
        """A number that no node of the job has had."""
        return self._supervisors.unused_node

    @property
    def leader(self) -> int:
        """The slot that leads as far as this supervisor can see."""
        return self._supervisors.leader

    # ---- inputs -------------------------------------------------------------------------------

    def first_seal(self) -> None:
        """Note that the own trainer has sealed its first snapshot."""
        if self.slot not in self._reports.sealed:
            self._tell_leader(FirstSeal(), 0.0)

    def progress(self, now_s: float) -> None:
        """Restart the time to answer a proposal: the own trainer announced a phase."""
        if self._fence_at_s is not None:
            self._fence_at_s = now_s + self._answer_limit_s()

    def trainer_done(self, exit_code: int | None) -> None:
        """Note that the own trainer finished its work; with `exit_code` set, it has exited."""
        self._fence_at_s = None
        self._tell_leader(Done(exit_code=exit_code), 0.0)

    def trainer_failed(
        self,
        evidence: str,
        exit_code: int | None,
        now_s: float,
        *,
        kind: str = "exit",
        raised: Raised | None = None,
    ) -> None:
        """Report that the own trainer is gone.

        `exit_code`: None if a signal killed it, or if it leaves; `raised`: what ended its script.
        """
        self._fence_at_s = None
        failure = self._own(kind, evidence, now_s)
        self._tell_leader(Report(failure=failure, exit_code=exit_code, raised=raised), now_s)

    def trainer_starts(self, incarnation: int) -> None:
        """Report that another trainer is started in the place of the failed one."""
        self.incarnation = incarnation
        message = Starts(worker=WorkerId(slot=self.slot, incarnation=incarnation))
        self._news.append(message)
        self._learn_news(self.slot, message, 0.0)
        self._broadcast(message)  # not only the leader: they may be lost together

    def trainer_ready(self, now_s: float) -> None:
        """Report that the own trainer, a new incarnation, is built and waits to be let in."""
        worker = WorkerId(slot=self.slot, incarnation=self.incarnation)
        arrival = Arrival(worker=worker, node=self._supervisors.nodes[self.slot])
        self._tell_leader(Ready(arrival=arrival), now_s)

    def give_notice(
        self, evidence: str, now_s: float, *, saves_last: bool = False, asked: bool = False
    ) -> None:
        """Report that the own trainer has to leave between two steps; `Dismiss` says when.

        `saves_last`: if all leave, it writes a checkpoint with the others, and ends by itself.
        `asked`: it stays if the job would otherwise end with nothing saved.
        """
        worker = WorkerId(slot=self.slot, incarnation=self.incarnation)
        notice = Notice(worker=worker, evidence=evidence, saves_last=saves_last, asked=asked)
        self._tell_leader(notice, now_s)

    def settled(self, epoch: int) -> None:
        """Report that the own trainer needs nothing sealed before this epoch: leavers may end."""
        left = (slot for slot in self._supervisors.living() if slot not in self.committed.ranks)
        for slot in left:
            self._send(slot, Settled(epoch=epoch))

    def severed(self, epoch: int, evidence: str, now_s: float) -> None:
        """Report that the own trainer's link to another one broke while it was needed.

        Usually the other one has died, and news of that follows at once. Otherwise both live: the
        same workers get a new view, dial its links again, and redo the step.
        """
        self._tell_leader(Severed(epoch=epoch, evidence=evidence), now_s)

    def replan(self, reason: str, now_s: float) -> None:
        """Ask for a view between two steps, for the wish that the own trainer's facts name."""
        self._tell_leader(Replan(epoch=self.committed.epoch, reason=reason), now_s)

    def leave(self, evidence: str, now_s: float) -> None:
        """Leave the job on a signal: the others go on without this worker."""
        self._broadcast(Report(failure=self._own("leave", evidence, now_s), exit_code=None))
        self.over = True  # it has told all, and nobody asks this worker again

    # ---- inside -------------------------------------------------------------------------------

    def _answer_limit_s(self) -> float:
        first = self.committed.epoch == 0
        return self.timeouts.join_timeout_s if first else self.timeouts.quiesce_timeout_s

    def _own(self, kind: str, evidence: str, now_s: float) -> FailureEvent:
        return FailureEvent(
            kind=kind,
            slot=self.slot,
            detected_at_s=now_s,
            evidence=evidence,
            incarnation=self.incarnation,
        )

    def _learn_news(self, slot: int, news: News, now_s: float) -> None:
        self._reports.learn(slot, news, epoch=self.committed.epoch, now_s=now_s)

    def _keep_who_is_needed(self, opened: MembershipView | None) -> None:
        """Void notices of workers that the job needs; `opened`: the proposed view."""
        if not (self._reports.leaving and self._reports.asked):
            return
        lost, view = self._supervisors.lost, self.committed
        stays = who_stays(view, opened, self._reports, lost=lost, layout=self.layout)
        for worker, why in stays.items():
            evidence = self._reports.take_back(worker, view)
            self._note("notice_void", slot=worker.slot, evidence=evidence, why=why)
            if worker.slot == self.slot:
                self._forget_notice(worker)
            else:
                self._send(worker.slot, Stays(worker=worker))

    def _tell_leader(self, news: News, now_s: float) -> None:
        """Tell the leader, which alone acts on news; a promise tells the next leader."""
        self._news.append(news)
        # Only the leader, which knows the wishes of all, can tell whether the worker stays.
        if self.leader == self.slot or not _is_drain_request(news):
            self._learn_news(self.slot, news, now_s)
        if self.leader != self.slot:
            self._send(self.leader, news)

    def _learn_drain_requests(self, now_s: float) -> None:
        """Judge the wishes that this supervisor had left to the leader: it leads now."""
        for news in filter(_is_drain_request, tuple(self._news)):
            self._learn_news(self.slot, news, now_s)

    @property
    def is_told_to_leave(self) -> bool:
        """True if a notice of the own trainer is in force, as far as is known; it may have died."""
        me = WorkerId(slot=self.slot, incarnation=self.incarnation)
        return any(isinstance(news, Notice) and news.worker == me for news in self._news)

    @property
    def told_to_leave(self) -> set[int]:
        """The slots whose workers have to go, and may be gone; the leader has heard of all."""
        return {worker.slot for worker in self._reports.notices}

    def _forget_notice(self, worker: WorkerId) -> None:
        """Forget a void notice: the next leader is not told that the worker was to leave."""
        self._news = [
            news for news in self._news if not (_is_drain_request(news) and news.worker == worker)
        ]

    def _forget_settled_news(self, view: MembershipView) -> None:
        """Forget news that a committed view has answered: the next leader need not know it."""
        self._news = [news for news in self._news if not self._is_settled(news, view)]

    def _is_settled(self, news: News, view: MembershipView) -> bool:
        match news:
            case Severed() | Replan():
                return news.epoch < view.epoch
            case Report():
                return self._reports.is_past(news.failure.worker, view)
            case Ready():
                return self._reports.is_past(news.arrival.worker, view)
            case Notice() | Starts():
                return self._reports.is_past(news.worker, view)
            case _:
                return False  # said once

    # ---- sending ------------------------------------------------------------------------------

    def _send(self, to: int, message: Message) -> None:
        self._effects.append(Send(to=to, message=message))

    def _broadcast(self, message: Message) -> None:
        self._effects += [
            Send(to=s, message=message) for s in self._supervisors.living() if s != self.slot
        ]

    def _note(self, kind: str, **fields: object) -> None:
        self._effects.append(Note(kind=kind, fields=fields))


def _is_drain_request(news: News) -> TypeGuard[Notice]:
    """Return whether it is a notice that may be void."""
    return isinstance(news, Notice) and news.asked
