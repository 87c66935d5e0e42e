"""One slot of a node: its trainers, one after the other, and what each says and is told.

Standard library only; all of it runs in the agent's control thread.
"""

import os
import signal
import socket
import time
from dataclasses import replace
from functools import partial
from typing import Any

import elaswave_plugin.ipc.frames as said
from elaswave_plugin.agent.common import Common
from elaswave_plugin.agent.keeper import Notice
from elaswave_plugin.agent.late_return import watch
from elaswave_plugin.agent.snapshot_server import Copies
from elaswave_plugin.agent.trainer_session import (
    StatusBoard,
    TrainerSession,
    behind,
    why_it_stays,
    why_layers_stay,
)
from elaswave_plugin.core.agreement.life import Life, Process, Stage, delay_or_reason
from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Begun,
    Deliver,
    Detached,
    Facts,
    Raised,
    Replan,
    Ring,
    Settled,
    Severed,
    Stop,
)
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_wire
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_FAILED
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import AGENT, HOST, INCARNATION, SLOT
from elaswave_plugin.ipc.process_tree import describe_status
from elaswave_plugin.ipc.progress_page import ProgressPage, page_of_worker, size_page
from elaswave_plugin.ipc.wire import Frame

GRACE_S = 2.0
# Who signals all processes of a node is heard twice: the launcher says so as well.
AGAIN_S = 2.0
LOOK_AGAIN_S = 0.25
SECRET = "elaswave secret"
LEFT = "it has left the job, as it was told to"


class Seat:
    """The trainers of one slot, started in one place of the node."""

    def __init__(self, common: Common, slot: int, place: int) -> None:
        self._common = common
        self.slot = slot
        self.place = place
        self.board = StatusBoard()
        self.trainer: TrainerSession
        self._ring: Ring | None = None
        self._awaited_epoch = 0
        self._signalled_s: float | None = None
        self._told = False
        self._started_s: float | None = None
        # The steps in which trainers of this slot have died.
        self._deaths: list[int] = []
        self._memory = common.store.open_slot(slot)
        self._copies = Copies(
            common,
            slot,
            tell=lambda message: common.reactor.post(lambda: self.trainer.send(message)),
        )

    # ---- start --------------------------------------------------------------------------------

    def start(self, incarnation: int) -> None:
        """Start a trainer."""
        common, spec = self._common, self._common.spec
        self._attach(Life(incarnation=incarnation))
        self._started_s = time.monotonic()
        if incarnation:
            watch(common, self.trainer)
        env = {
            **spec.envs[self.place],
            SLOT: str(self.slot),
            HOST: spec.host,
            AGENT: common.address,
            INCARNATION: str(incarnation),
        }
        common.keeper.start(
            place=self.place,
            slot=self.slot,
            incarnation=incarnation,
            program=spec.program_in(self.place),
            env=env,
            memory=(SECRET, page_of_worker(self.slot, incarnation), *self._memory),
        )

    def resume(self, incarnation: int, known: Notice | None, pidfd: int, kept: Frame) -> None:
        """Begin with a trainer of an agent's earlier life; `kept`: what is stored of it."""
        life: Life = from_json(Life, kept["life"])
        self._attach(life if life.incarnation == incarnation else Life(incarnation=incarnation))
        self._deaths = kept["deaths"]
        if known is not None and known["pid"]:
            self.trainer.started(known["pid"], pidfd)

    def go_on(self, known: Notice | None) -> None:
        """Act on the end of a resumed trainer, where it has ended; what comes of it is stored."""
        life = self.trainer.life
        if life.end is not None:
            self._tell_end(*life.end)  # the others may not have heard of it
        if life.process is Process.REPLACED:
            self._common.reactor.after(LOOK_AGAIN_S, self._start_again_when_past)
        elif life.process is not Process.GONE and (known is None or known["end"] is not None):
            unseen = {"status": None, "why": "gone with an agent's earlier life", "exit_code": None}
            self.on_end(unseen if known is None else known["end"])

    @property
    def kept(self) -> Frame:
        """The facts of the seat that an agent's next life needs."""
        return {"place": self.place, "deaths": self._deaths, "life": self.trainer.life}

    def _attach(self, life: Life) -> None:
        page_fd = self._common.keeper.memory(page_of_worker(self.slot, life.incarnation))
        size_page(page_fd)
        page = ProgressPage(page_fd)
        os.close(page_fd)
        self.trainer = TrainerSession(
            slot=self.slot,
            life=life,
            page=page,
            reactor=self._common.reactor,
            on_frame=self._on_frame,
            on_gone=self._on_gone,
            encode=self._common.encode,
        )

    # ---- what the guardian tells --------------------------------------------------------------

    def knows(self, notice: Notice) -> bool:
        """Return whether a notice is of an earlier trainer, or of what was asked for already."""
        life = self.trainer.life
        if life.incarnation != notice["incarnation"]:
            return True
        return self.trainer.pid > 0 if notice["n"] == "started" else life.process >= Process.GONE

    def on_start(self, notice: Notice, pidfd: int) -> None:
        """A trainer runs."""
        self.trainer.started(notice["pid"], pidfd)
        self._common.events.emit(
            "worker_started",
            slot=self.slot,
            incarnation=notice["incarnation"],
            pid=notice["pid"],
            agent_pid=os.getpid(),
            node=self._common.node,
            address=self._common.address,
        )

    def on_end(self, end: Notice) -> None:
        """The trainer has ended, by a wait status where one is known, and all that it started."""
        self.trainer.hear_the_rest()
        status, code = end["why"], end["exit_code"]
        if end["status"] is not None:
            status, code = describe_status(end["status"])
        life = self.trainer.life
        was_gone, life.process = not life.lives, Process.GONE
        (self._end_late if was_gone else self._end)(status, code)
        self._common.on_change()  # the guardian tells of it no more
        self._common.keeper.seen(self.slot, life.incarnation)

    def called(self, incarnation: int, epoch: int, sock: socket.socket) -> None:
        """A trainer has opened its control link; `epoch`: of the newest view that it was told."""
        trainer, common = self.trainer, self._common
        if incarnation != trainer.life.incarnation or not trainer.life.lives:
            sock.close()
            return
        trainer.called(sock)
        if common.exit_code is not None:
            trainer.send(Stop(reason="the job is over", exit_code=EXIT_FAILED))
            return
        agreement = common.agreement
        if self.slot not in agreement.seats or agreement.seats[self.slot].dismissed:
            trainer.send(Stop(reason=LEFT, exit_code=0))
            return
        missed = agreement.missed(self.slot, epoch)
        if missed is not None:
            self.deliver(missed)
        if agreement.started:
            trainer.send(AllSealed())
        for notice in agreement.notices_of(self.slot):
            trainer.send(notice)
        if self._ring is not None and (trainer.life.has_entered or agreement.wants(self.slot)):
            trainer.send(self._ring)

    # ---- what the agreement wants -------------------------------------------------------------

    def ring(self, ring: Ring) -> None:
        """A proposal is open, or has become urgent."""
        life, agreement, self._ring = self.trainer.life, self._common.agreement, ring
        self.board.proposed(ring, time.time())
        if ring.is_urgent:
            life.reach(Stage.STOPPING)
        if life.is_member:
            self.trainer.send(ring)
        elif life.works and life.has_come:
            # One that is not in any view yet waits for one where it stands.
            self.trainer.send(ring) if life.is_replacement else self._answer(life.facts)
        elif life.works and (not life.is_replacement or agreement.wants(self.slot)):
            pass  # it answers once it has joined, or called an agent's next life
        else:
            self._answer(None)

    def deliver(self, news: Deliver) -> None:
        """A view is committed with this worker in it; one that enters is told of all before."""
        trainer, view = self.trainer, news.committed.proposal.view
        is_new = not trainer.life.has_entered
        trainer.life.reach(Stage.TRAINING)
        if is_new:
            history = self._common.agreement.history[1:]
            news = replace(news, skipped=tuple(one for one in history if one.epoch < view.epoch))
            self._common.on_change()
        self.board.committed((*news.skipped, view), time.time())
        trainer.send(news)

    def dismiss(self) -> None:
        """A view without the trainer is committed, as it was told to leave."""
        self.trainer.life.reach(Stage.LEAVING)
        self._common.on_change()
        self.trainer.send(Stop(reason=LEFT, exit_code=0))
        self._common.reactor.after(GRACE_S, self.trainer.kill)

    def end(self, reason: str) -> None:
        """The job is over: the trainer is told, and ended where it does not end by itself."""
        trainer = self.trainer
        if not trainer.life.lives:
            return
        trainer.send(Stop(reason=reason, exit_code=EXIT_FAILED))
        if not trainer.life.has_come:
            trainer.ask_to_end(signal.SIGTERM)  # it does not listen to us yet
        self._common.reactor.after(GRACE_S, trainer.kill)

    def close(self) -> None:
        """Let go of it."""
        self._copies.close()
        self.trainer.close()

    # ---- what the trainer says ----------------------------------------------------------------

    def _on_frame(self, trainer: TrainerSession, frame: Frame) -> None:
        try:
            message: said.FromTrainer = from_json(said.FromTrainer, frame)
        except UnreadableMessageError as error:
            trainer.fence(f"it {error}")
            return
        common, slot, life = self._common, self.slot, trainer.life
        agreement = common.agreement
        if slot not in agreement.seats:
            return  # it has to end, and handles the signal that says so, or was about to say this
        now_s = time.monotonic()
        match message:
            case said.Join():
                self._on_join(trainer, message)
            case said.Ready():
                self._on_ready(life, message)
            case Begun():
                agreement.begun(slot, message.ballot, message.step)
            case said.SavesLast():
                life.saves_last = True
                common.on_change()
            case said.SetConstants():
                common.constants.update(message.what)
                common.on_change()
            case said.Quiesced():
                if self._ring is not None and self._ring.ballot.epoch == message.epoch:
                    life.reach(Stage.QUIESCED)
                    self._answer(message.facts)
            case said.Sealed():
                agreement.first_seal(slot)
                self._note_how_long()
                self._copies.send(message.record, message.copy_to)
            case Settled():
                common.store.release(message.epoch)
                agreement.settled(slot, message.epoch)
            case said.Progress():
                life.announced = message.text
                agreement.progress(slot, now_s)
                self._tell_that_it_is_awaited(message.text)
            case Severed() | Replan():
                agreement.tell_leader(message, now_s)
            case Raised():
                trainer.take_raised(message, sealed=common.store.newest_step(slot))
            case said.Finish():
                common.completed = message.completed
                self._on_finish()
            case said.Leave():
                life.reach(Stage.LEAVING)
                life.returns = message.returns
                common.on_change()
                agreement.trainer_failed(slot, message.reason, None, now_s, kind="leave")
            case Stop():
                agreement.abandon(f"worker {slot}: {message.reason}", message.exit_code)
            case Detached():
                trainer.missing = message.missing
                if message.trains:
                    agreement.detached(message)
            case said.Layout():
                agreement.layout = trainer.layout = message.layout
            case said.SlowSeen():
                trainer.slow = message.slow

    def _note_how_long(self) -> None:
        """It has come as far as it gets without the others: to a first seal, or to the way in."""
        if self._started_s is not None:
            took_s = time.monotonic() - self._started_s
            self._common.took_s, self._started_s = max(self._common.took_s, took_s), None

    def hear(self, request: Frame) -> Frame:
        """Take what the trainer says beside its control link."""
        trainer = self.trainer
        if int(request["incarnation"]) == trainer.life.incarnation and trainer.life.lives:
            if trainer.control is not None:
                trainer.control.drain()
            self._on_frame(trainer, request["frame"])
        return {"t": "heard"}

    def _on_join(self, trainer: TrainerSession, message: said.Join) -> None:
        common, life = self._common, trainer.life
        if life.is_replacement:
            life.reach(Stage.BUILDING)
            view = common.agreement.history[1]
            trainer.send(said.StartDetached(view=view, job_constants=common.constants))
            return
        life.facts = message.facts
        life.reach(Stage.JOINED)
        if common.respawn != message.respawn:
            common.respawn = message.respawn
            common.on_change()
        if self._ring is not None and not life.has_entered:
            self._answer(life.facts)

    def _on_ready(self, life: Life, message: said.Ready) -> None:
        life.facts = message.facts
        life.reach(Stage.WAITING_TO_ENTER)
        self._note_how_long()
        incarnation = life.incarnation
        self._common.events.emit("worker_ready", slot=self.slot, incarnation=incarnation)
        # A view with it that an earlier leader had proposed may come to nothing.
        if not life.has_entered:
            self._common.coordinator.enter(self.slot, wanted=lambda: life.works)

    def _on_finish(self) -> None:
        self.trainer.life.reach(Stage.FINISHED)
        self._common.on_change()
        when = behind(self._common.store.newest_step(self.slot))
        self._common.agreement.trainer_done(self.slot, None, when)
        if self._ring is not None:
            self._answer(None)
        # Its exit ends the job, and may hang (a thread, a hook at exit).
        grace_s = self._common.spec.timeouts.finish_grace_s
        self._common.reactor.after(grace_s, partial(self._kill_the_finished, self.trainer))

    def _kill_the_finished(self, trainer: TrainerSession) -> None:
        if trainer.life.lives:
            grace_s = self._common.spec.timeouts.finish_grace_s
            say(f"worker {self.slot} had finished and did not exit within {grace_s:g} s: killed")
            trainer.kill()

    def _tell_that_it_is_awaited(self, phase: str) -> None:
        """Say once a proposal that it is awaited: an announced phase may take minutes."""
        ring = self._ring
        if ring is not None and ring.ballot.epoch > self._awaited_epoch:
            self._awaited_epoch = ring.ballot.epoch
            self._common.events.emit(
                "awaited", slot=self.slot, epoch=ring.ballot.epoch, announced_phase=phase
            )
            say(f"worker {self.slot} is in an announced phase ({phase}); the others wait for it")

    def _answer(self, facts: Facts | None) -> None:
        self.board.answered()
        if self._ring is not None:
            common = self._common
            common.agreement.quiesced(
                self.slot,
                self._ring.ballot,
                facts,
                lambda: [to_wire(one) for one in common.store.inventory(common.address)],
                entering=not self.trainer.life.has_entered,
            )

    # ---- how it ends --------------------------------------------------------------------------

    def _on_gone(self, status: str) -> None:
        """Count it as gone, although its process is still there."""
        self._end(status, None)
        self._common.on_change()

    def _end(self, status: str, exit_code: int | None) -> None:
        common, trainer, life = self._common, self.trainer, self.trainer.life
        evidence = trainer.fence_evidence or status
        life.end = evidence, exit_code
        common.events.emit(
            "worker_exited",
            slot=self.slot,
            incarnation=life.incarnation,
            pid=trainer.pid,
            status=status,
            evidence=evidence,
        )
        if common.exit_code is not None or self.slot not in common.agreement.seats:
            common.on_idle()
            return
        is_failure = self._tell_end(evidence, exit_code)
        if life.process is Process.GONE:
            if is_failure:
                self._replace(exit_code)
            elif life.stage is Stage.LEAVING and life.returns:
                self._start_again()
        elif is_failure and life.process is Process.STUCK:  # one that ends gives its device back
            self._give_slot_back()
        if self._ring is not None and self.slot in common.agreement.seats:
            self._answer(None)

    def _tell_end(self, evidence: str, exit_code: int | None) -> bool:
        """Tell the others how the trainer has ended; returns whether it has failed."""
        common, agreement, trainer = self._common, self._common.agreement, self.trainer
        life = trainer.life
        if life.stage is Stage.FINISHED:
            # A signal after the work was done takes nothing away from it.
            agreement.trainer_done(self.slot, exit_code or 0)
        elif exit_code == 0 and not (life.has_come or life.is_replacement):
            agreement.detached(Detached(slot=self.slot, trains=False, missing=trainer.missing))
            agreement.trainer_done(self.slot, 0)
        elif life.stage < Stage.LEAVING:
            sealed, args = common.store.newest_step(self.slot), common.spec.program.args
            evidence = trainer.end_of(evidence, exit_code, sealed=sealed, args=args)
            now_s, raised = time.monotonic(), life.raised
            agreement.trainer_failed(self.slot, evidence, exit_code, now_s, raised=raised)
            return True
        return False

    def _end_late(self, status: str, exit_code: int | None) -> None:
        """One that counts as gone has ended after all."""
        life = self.trainer.life
        who = {"slot": self.slot, "incarnation": life.incarnation}
        self._common.events.emit("worker_exited_late", status=status, **who)
        if life.returns:
            self._start_again()
        elif life.stage < Stage.LEAVING:
            self._replace(exit_code)

    def _replace(self, exit_code: int | None) -> None:
        """Start another trainer in the place of the one that failed, where that is sensible."""
        common, life = self._common, self.trainer.life
        if exit_code == EXIT_CONFIGURATION or not common.respawn:
            self._give_slot_back()
            return
        self._deaths.append(self.trainer.reached(common.store.newest_step(self.slot)))
        verdict = delay_or_reason(self._deaths, limit=common.respawn)
        if isinstance(verdict, str):
            who = {"slot": self.slot, "incarnation": life.incarnation}
            common.events.emit("respawn_given_up", reason=verdict, **who)
            say(f"worker {self.slot} is not started again: {verdict}")
            self._give_slot_back()
        else:
            life.process = Process.REPLACED
            common.reactor.after(verdict, self._start_again_when_past)

    def _start_again_when_past(self) -> None:
        """Not while the others may fail alike, nor in the place of one that was to leave."""
        agreement, life = self._common.agreement, self.trainer.life
        if self.slot not in agreement.seats or self._common.exit_code is not None:
            return
        may_fail_alike = life.raised is not None and not agreement.others_went_on(self.slot)
        if may_fail_alike or agreement.notices_of(self.slot):
            self._common.reactor.after(LOOK_AGAIN_S, self._start_again_when_past)
        elif life.stage < Stage.LEAVING:
            self._start_again()

    def _give_slot_back(self) -> None:
        """A node that came later, and has brought no worker in, leaves the slot to others."""
        common = self._common
        is_member = self.slot in common.agreement.committed.ranks
        came = common.spec.joins or self.place >= len(common.spec.envs) - common.spec.standby
        if came and common.exit_code is None and not is_member:
            say(f"worker {self.slot} could not join: its slot is free for others")
            common.agreement.vacate(self.slot, "its worker could not join")

    def _start_again(self) -> None:
        common = self._common
        if common.exit_code is not None or self.slot not in common.agreement.seats:
            return
        incarnation = self.trainer.life.incarnation + 1
        say(f"worker {self.slot} is being started again")
        common.agreement.trainer_starts(self.slot, incarnation)
        # An agent's next life must not start the same once more.
        common.coordinator.store_record()
        self.trainer.close()
        self.start(incarnation)
        common.on_change()

    # ---- who wants it to leave ----------------------------------------------------------------

    def take_signal(self, number: int, reason: str) -> None:
        """A signal asks it to end: between two steps at first, at once where it comes again."""
        now_s = time.monotonic()
        self._signalled_s = self._signalled_s or now_s
        again = now_s - self._signalled_s >= AGAIN_S
        (self._leave if again or number == signal.SIGINT else self.heed)(number, reason)

    def heed(self, number: int, reason: str) -> None:
        """End between two steps where there are any; a scheduler may say so in two ways."""
        if not (self.trainer.life.lives and self.trainer.life.has_entered):
            self._leave(number, reason)
        elif not self._told:
            self._told = True
            if self.trainer.life.works:  # else it is about to end by itself
                self.drain(reason)
            leave = partial(self._leave, number, reason)
            self._common.reactor.after(self._common.spec.timeouts.notice_timeout_s, leave)

    def drain(self, reason: str, *, asked: bool = False) -> None:
        """Have the trainer leave between two steps, with nothing lost and nothing done twice.

        `asked`: it stays where the job would end without it and nothing is saved.
        """
        saves = self.trainer.life.saves_last
        notice = self._common.agreement.give_notice(
            self.slot, reason, time.monotonic(), saves_last=saves, asked=asked
        )
        self.trainer.send(notice)  # before the change of the view that it leads to
        self._common.coordinator.store_record()  # before anybody is told that it leaves

    def _leave(self, number: int, reason: str) -> None:
        """The other workers go on without this one, from the state of the last step."""
        common = self._common
        if common.exit_code is not None or self.slot not in common.agreement.seats:
            return
        common.agreement.leave(self.slot, reason, time.monotonic())
        if not common.agreement.seats:
            common.exit_code = 128 + number
        if self.trainer.life.lives:
            self.trainer.ask_to_end(number)
            common.reactor.after(GRACE_S, self.trainer.kill)
        else:
            common.on_idle()

    # ---- requests -----------------------------------------------------------------------------

    def answer_drain(self, request: Frame) -> Frame:
        """Have the worker leave, as a user asks."""
        ranks = self._common.agreement.committed.ranks
        refused = why_it_stays(self.trainer, ranks, self.slot)
        if refused is None:
            self.drain(str(request["reason"]), asked=True)
        return {"t": "drain", "refused": refused}

    def answer_migrate(self, request: Frame) -> Frame:
        """Have the trainer's facts name the cuts, and ask for a view between two steps."""
        refused = why_layers_stay(self.trainer, self.board, request["cuts"])
        if refused is None:
            self.trainer.send(said.CutsWanted(cuts=tuple(request["cuts"])))
            agreement = self._common.agreement
            wish = Replan(epoch=agreement.committed.epoch, reason=str(request["reason"]))
            agreement.tell_leader(wish, time.monotonic())
        return {"t": "migrate", "refused": refused}

    def status(self, now_s: float) -> dict[str, Any]:
        """The facts that are known of the worker, for `elaswave status`."""
        return self.board.report(self.trainer, self.trainer.progress(0.0), now_s=now_s)
