"""The reports of an agent on its own trainers, and its knowledge of the others (pure).

The base of `agreement.Agreement`: news goes to the leader, and with a promise to the next one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Detached,
    Done,
    Effect,
    FirstSeal,
    Message,
    News,
    Note,
    Notice,
    Raised,
    Ready,
    Replan,
    Report,
    Send,
    Settled,
    Severed,
    Starts,
    Stays,
)
from elaswave_plugin.core.agreement.next_view import who_stays
from elaswave_plugin.core.agreement.quorum import Nodes
from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import (
    Arrival,
    FailureEvent,
    MembershipView,
    WorkerId,
    first_view,
)

FIRST_NODES = 3
"""The nodes with which every agent has a link: the leader, and two that may follow it."""


@dataclass(slots=True, kw_only=True)
class Seat:
    """A slot of this node, as its agent knows it; `incarnation`: of its newest trainer.

    `fence_at_s`: when that is too late with its answer; `detached`: it works without having joined,
    so that nobody waits for it; `dismissed`: it may leave, as it was told to.
    """

    incarnation: int = 0
    fence_at_s: float | None = None
    detached: bool = False
    dismissed: bool = False


class Reporter:
    """The trainers of one node; `nodes[s]` is the node of slot s."""

    def __init__(self, *, node: int, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        self.node = node
        self.timeouts = timeouts
        # The first two views of the job, and those that some member may not know.
        self.history = [first_view(nodes)]
        # As a trainer has told it, in JSON; None in a data-parallel job.
        self.layout: Mapping[str, Any] | None = None
        self.over = False
        self.nodes = Nodes(nodes)
        # Of the agents of other nodes.
        self.addresses: dict[int, str] = {}
        self.seats = {slot: Seat() for slot in self.nodes.slots_of(node)}
        self._reports = Reports(timeouts)
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
        """True if no worker begins another step, as far as this agent knows."""
        return self.over or self._reports.is_ending(self.committed)

    @property
    def has_majority(self) -> bool:
        """True if the living agents that this one sees are on most nodes of the view."""
        return self.nodes.minority_in(self.nodes.living(), [self.committed]) is None

    def others_went_on(self, slot: int) -> bool:
        """Return whether a view without this worker is settled: no earlier state is needed."""
        view = self.committed
        return slot not in view.ranks and self._reports.all_settled(view)

    @property
    def leader(self) -> int:
        """The node that leads as far as this agent can see."""
        return self.nodes.leader

    # ---- inputs -------------------------------------------------------------------------------

    def first_seal(self, slot: int) -> None:
        """Note that a trainer has sealed its first snapshot."""
        if slot not in self._reports.sealed:
            self.tell_leader(FirstSeal(slot=slot), 0.0)

    def progress(self, slot: int, now_s: float) -> None:
        """Restart the time to answer a proposal: a trainer announced a phase."""
        seat = self.seats[slot]
        if seat.fence_at_s is not None:
            seat.fence_at_s = now_s + self._answer_limit_s()

    def trainer_done(self, slot: int, exit_code: int | None, when: str = "") -> None:
        """Note that a trainer finished its work; with `exit_code` set, it has exited.

        `when`: where in the training it finished.
        """
        self.seats[slot].fence_at_s = None
        self.tell_leader(Done(slot=slot, exit_code=exit_code, when=when), 0.0)

    def trainer_failed(
        self,
        slot: int,
        evidence: str,
        exit_code: int | None,
        now_s: float,
        *,
        kind: str = "exit",
        raised: Raised | None = None,
    ) -> None:
        """Report that a trainer is gone.

        `exit_code`: None if a signal killed it, or if it leaves; `raised`: what ended its script.
        """
        self.seats[slot].fence_at_s = None
        failure = FailureEvent(
            kind=kind,
            slot=slot,
            detected_at_s=now_s,
            evidence=evidence,
            incarnation=self.seats[slot].incarnation,
        )
        self.tell_leader(Report(failure=failure, exit_code=exit_code, raised=raised), now_s)

    def trainer_starts(self, slot: int, incarnation: int) -> None:
        """Report that another trainer is started in the place of the failed one."""
        self.seats[slot].incarnation = incarnation
        message = Starts(worker=WorkerId(slot=slot, incarnation=incarnation))
        self._news.append(message)
        self._learn_news(message, 0.0)
        self._tell_first_nodes(message)  # not only the leader: they may be lost together

    def trainer_ready(self, slot: int, now_s: float) -> None:
        """Report that a trainer, a new incarnation, is built and waits to be let in."""
        arrival = Arrival(worker=self.worker(slot), node=self.node)
        self.tell_leader(Ready(arrival=arrival), now_s)

    def give_notice(
        self,
        slot: int,
        evidence: str,
        now_s: float,
        *,
        saves_last: bool = False,
        asked: bool = False,
    ) -> Notice:
        """Report that a trainer has to leave between two steps; `Dismiss` says when.

        `saves_last`: if all leave, it writes a checkpoint with the others, and ends by itself.
        `asked`: it stays if the job would otherwise end with nothing saved.
        """
        worker = self.worker(slot)
        notice = Notice(worker=worker, evidence=evidence, saves_last=saves_last, asked=asked)
        self.tell_leader(notice, now_s)
        return notice

    def settled(self, slot: int, epoch: int) -> None:
        """Report that a trainer needs nothing sealed before this epoch: leavers may end."""
        message = Settled(slot=slot, epoch=epoch)
        self._learn_news(message, 0.0)
        if self.leader == self.node:
            self._tell_leavers(message, self.node)
        else:
            self._send(self.leader, message)

    def _tell_leavers(self, message: Settled, sender: int) -> None:
        """Pass on, as the leader, what lets those end that are in the view no more."""
        for node in self.nodes.living():
            if node not in (self.node, sender) and self._has_left(node):
                self._send(node, message)

    def _has_left(self, node: int) -> bool:
        return any(slot not in self.committed.ranks for slot in self.nodes.slots_of(node))

    def _tell_again(self, node: int) -> None:
        """Tell on a new link what was said while there was none, to the leader or as the leader."""
        leads = self.leader == self.node
        for news in () if leads else self._news:
            if not isinstance(news, AllSealed):
                self._send(node, news)
        for slot, epoch in self._reports.settled.items():
            if self._has_left(node) if leads else slot in self.seats:
                self._send(node, Settled(slot=slot, epoch=epoch))

    # ---- inside -------------------------------------------------------------------------------

    def _answer_limit_s(self) -> float:
        first = self.committed.epoch == 0
        return self.timeouts.join_timeout_s if first else self.timeouts.quiesce_timeout_s

    def worker(self, slot: int) -> WorkerId:
        """The newest trainer of an own slot."""
        return WorkerId(slot=slot, incarnation=self.seats[slot].incarnation)

    def _learn_news(self, news: News, now_s: float) -> None:
        is_first = isinstance(news, Detached) and self._reports.lacking is None
        if is_first and self.leader == self.node:  # once for all
            self._note("detached", **asdict(news))
        self._reports.learn(news, epoch=self.committed.epoch, now_s=now_s)

    def _keep_who_is_needed(self, opened: MembershipView | None) -> None:
        """Void notices of workers that the job needs; `opened`: the proposed view."""
        if not (self._reports.leaving and self._reports.asked):
            return
        view = self.committed
        lost = self.nodes.without_agent
        stays = who_stays(view, opened, self._reports, lost=lost, layout=self.layout)
        for worker, why in stays.items():
            evidence = self._reports.take_back(worker, view)
            self._note("notice_void", slot=worker.slot, evidence=evidence, why=why)
            if worker.slot in self.seats:
                self._forget_notice(worker)
            else:
                self._send(self.nodes.of_slots[worker.slot], Stays(worker=worker))

    def tell_leader(self, news: News, now_s: float) -> None:
        """Tell the leader, which alone acts on news; a promise tells the next leader."""
        self._news.append(news)
        # Only the leader, which knows the wishes of all, can tell whether the worker stays.
        if self.leader == self.node or not _is_drain_request(news):
            self._learn_news(news, now_s)
        if self.leader != self.node:
            self._send(self.leader, news)

    def _learn_drain_requests(self, now_s: float) -> None:
        """Judge the wishes that this agent had left to the leader: it leads now."""
        for news in filter(_is_drain_request, tuple(self._news)):
            self._learn_news(news, now_s)

    def notices_of(self, slot: int) -> list[Notice]:
        """List the notices to an own trainer, which may be dead, that are in force here."""
        return [one for one in self.own_notices if one.worker == self.worker(slot)]

    @property
    def own_notices(self) -> tuple[Notice, ...]:
        """The notices of own trainers that are in force, as far as is known."""
        return tuple(news for news in self._news if isinstance(news, Notice))

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

    def _tell_first_nodes(self, message: Message) -> None:
        """Tell the leader and those that would follow it, with which every agent has a link."""
        first = self.nodes.living()[:FIRST_NODES]
        self._effects += [Send(to=node, message=message) for node in first if node != self.node]

    def _broadcast(self, message: Message) -> None:
        """Tell all, as the leader or as one that wants to lead."""
        self._effects += [
            Send(to=node, message=message) for node in self.nodes.living() if node != self.node
        ]

    def _note(self, kind: str, **fields: object) -> None:
        self._effects.append(Note(kind=kind, fields=fields))


def _is_drain_request(news: News) -> TypeGuard[Notice]:
    """Return whether it is a notice that may be void."""
    return isinstance(news, Notice) and news.asked
