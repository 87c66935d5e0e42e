"""One worker's supervisor: owns the trainers of a slot and their snapshots, and outlives them.

Standard library only. Control is one thread (the reactor); bulk bytes have threads of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from functools import partial

import elaswave_plugin.ipc.frames as said
from elaswave_plugin.core.agreement.effects import Ring
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.messages import (
    Ballot,
    Committed,
    Detached,
    Facts,
    Raised,
    Severed,
    Stop,
)
from elaswave_plugin.core.agreement.respawn import Deaths, GiveUp
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_REQUEUE,
    AgreementError,
    ConfigurationError,
)
from elaswave_plugin.ipc.address_file import Address, clear_addresses, published
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import HOST, SLOT
from elaswave_plugin.ipc.job_constants import JobConstants
from elaswave_plugin.ipc.process_tree import Orphans
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.relay import RELAY, carry
from elaswave_plugin.ipc.requests import in_loop
from elaswave_plugin.ipc.stack_line import where_is
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import Frame
from elaswave_plugin.supervisor.notice_file import NOTICE_FILE, watch_notice_file
from elaswave_plugin.supervisor.peers.coordinator import Coordinator
from elaswave_plugin.supervisor.peers.job_summary import job_summary, sums_up
from elaswave_plugin.supervisor.peers.join_client import SlotRefusedError
from elaswave_plugin.supervisor.peers.join_server import Reception, take_link
from elaswave_plugin.supervisor.peers.node_register import REGISTER, NodeRegister
from elaswave_plugin.supervisor.peers.rendezvous import EndedEarlyError
from elaswave_plugin.supervisor.refused_requests import why_it_stays, why_layers_stay
from elaswave_plugin.supervisor.slot import OwnSlot, slot_at_launch, slot_in_job
from elaswave_plugin.supervisor.snapshot_copies import Copies
from elaswave_plugin.supervisor.snapshot_server import SnapshotServer
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore
from elaswave_plugin.supervisor.status_board import StatusBoard
from elaswave_plugin.supervisor.supervisor_spec import SupervisorSpec
from elaswave_plugin.supervisor.trainer_process import ZygoteTrainer
from elaswave_plugin.supervisor.trainer_session import TrainerSession, start_session
from elaswave_plugin.tracking.async_log import AsyncLog

GRACE_S = 2.0
GOODBYE_S = 1.0
# Who signals all processes of a node is heard twice: the launcher says so as well.
AGAIN_S = 2.0
LOOK_AGAIN_S = 0.25
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Supervisor:
    """Runs the trainer of one slot, and another where that is lost; `run` returns the exit code."""

    def __init__(
        self, spec: SupervisorSpec, *, listener: socket.socket | None, zygote: socket.socket | None
    ) -> None:
        self._spec = spec
        self._slot = spec.rendezvous.slot
        self._listener = listener
        self._reactor = Reactor()
        self._store = SnapshotStore(self._slot)
        self._events = AsyncLog(f"{spec.run_dir}/events.jsonl" if spec.run_dir else None)
        self._board = StatusBoard(self._slot)
        self._ballot: Ballot | None = None
        self._awaited_epoch = 0
        self._orphans = Orphans(self._reactor, grace_s=GRACE_S)
        self._exit_code: int | None = None
        self._signalled_s: float | None = None
        self._zygote = zygote
        self._deaths: Deaths | None = None
        self._job_constants: JobConstants = {"started_s": time.time()}
        self._completed, self._sums_up, self._told = 0, False, False
        self._register = NodeRegister.create()
        self._server = self._make_server()
        self._data_address = self._server.address
        if not spec.joins:
            # Before anything else: its imports take longest, and no thread runs here yet.
            self._trainer = self._start_trainer(0)

    def run(
        self,
        *,
        on_met: Callable[[str], None] = lambda address: None,
        on_trainer: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Supervise until the job is over. Raises SlotRefusedError, and nothing is left of it then.

        `on_met` is told where this supervisor answers, `on_trainer` the process id of each trainer
        and 0 at its end.
        """
        self._on_trainer = on_trainer
        set_title(f"supervisor {self._slot}")
        for number in _SIGNALS:
            signal.signal(number, self._on_early_signal)
        self._server.start()
        try:
            own = self._take_slot() if self._spec.joins else self._meet()
        except SlotRefusedError:
            for part in (self._server, self._store, self._reactor):
                part.close()
            raise
        except (AgreementError, ConfigurationError) as error:
            say(f"the job does not start: {error}")
            self._trainer.process.send_signal(signal.SIGKILL)
            if isinstance(error, EndedEarlyError):
                return EXIT_FAILED
            bad_input = isinstance(error, ConfigurationError)
            return EXIT_CONFIGURATION if bad_input else EXIT_REQUEUE
        self._coordinator = Coordinator(
            self._reactor,
            own.meeting,
            self._register,
            slot=self._slot,
            secret=self._spec.rendezvous.secret,
            timeouts=self._spec.timeouts,
            heartbeat=self._spec.heartbeat,
            trainer_side=self,
            events=self._events,
        )
        self._agreement = self._coordinator.agreement
        self._reception = self._open_reception()
        self._copies = Copies(
            self._store,
            self._coordinator.peers,
            rendezvous=self._spec.rendezvous,
            tell=lambda message: self._reactor.post(lambda: self._trainer.send(message)),
            events=self._events,
        )
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        self._attach(self._trainer)
        if notice_file := self._spec.env.get(NOTICE_FILE):
            watch_notice_file(self._reactor, notice_file, partial(self._heed, signal.SIGTERM))
        address = published(self._spec.run_dir, self._address(), self._lost_supervisors)
        # Also where it crashes: its last events say most.
        with closing(self._events), address:
            on_met(self._data_address)
            self._reactor.run()
        self._coordinator.finish(GOODBYE_S)
        self._orphans.finish()
        if self._sums_up:
            changes, started_s = self._coordinator.changes, self._job_constants["started_s"]
            say(job_summary(changes, self._completed, started_s, self._spec.run_dir))
        return EXIT_FAILED if self._exit_code is None else self._exit_code

    # ---- start --------------------------------------------------------------------------------

    def _start_trainer(self, incarnation: int) -> TrainerSession:
        env = {**self._spec.env, SLOT: str(self._slot), HOST: self._spec.host}
        return start_session(
            self._spec.program,
            incarnation=incarnation,
            env=env,
            snapshot_fds=self._store.fds,
            zygote=self._zygote,
            secret=self._spec.rendezvous.secret,
        )

    def _attach(self, trainer: TrainerSession) -> None:
        trainer.attach(
            self._reactor,
            on_frame=self._on_trainer_frame,
            on_start=self._on_start,
            on_exit=self._on_exit,
            on_late_exit=self._on_late_exit,
        )

    def _meet(self) -> OwnSlot:
        spec, data = self._spec, self._data_address
        if self._listener is not None:
            clear_addresses(spec.run_dir)
        # Closed after the meeting: the port is the script's to use.
        with self._listener or nullcontext() as listener:
            return slot_at_launch(spec.rendezvous, spec.host, listener, data, self._register)

    def _take_slot(self) -> OwnSlot:
        """Become a supervisor of a job that runs, and start the slot's next trainer."""
        spec, data = self._spec, self._data_address
        own = slot_in_job(spec.rendezvous, spec.joins, data, self._register)
        assert own.kept is not None and own.meeting.welcome is not None
        self._job_constants = own.kept["job_constants"]
        self._deaths = Deaths(limit=limit) if (limit := int(own.kept["respawn"])) else None
        self._trainer = self._start_trainer(own.meeting.welcome.worker.incarnation)
        return own

    def _open_reception(self) -> Reception:
        spec = self._spec
        return Reception(
            self._coordinator,
            slot=self._slot,
            program=spec.program,
            env=spec.env,
            run_dir=spec.run_dir,
            timeouts=spec.timeouts,
            heartbeat=spec.heartbeat,
            kept=lambda: {
                "job_constants": self._job_constants,
                "respawn": 0 if self._deaths is None else self._deaths.limit,
            },
        )

    def _make_server(self) -> SnapshotServer:
        answers = {
            "status": self._answer_status,
            "drain": self._answer_drain,
            "migrate": self._answer_migrate,
            "roster": lambda request: self._reception.answer_roster(request),
            "kept": lambda request: self._reception.answer_kept(request),
            "admit": lambda request: self._reception.answer_admit(request),
        }
        take = partial(take_link, self._reactor, lambda: self._reception)
        relay = partial(carry, lambda: {peer.data for peer in self._coordinator.peers})
        in_turn = {name: in_loop(self._reactor, answer) for name, answer in answers.items()}
        return SnapshotServer(
            self._store,
            self._spec.host,
            {**in_turn, "where": self._answer_where},
            {"link": take, REGISTER: self._register.hand, RELAY: relay},
            secret=self._spec.rendezvous.secret,
        )

    def _address(self) -> Address:
        node, address = self._spec.rendezvous.node, self._data_address
        return Address(slot=self._slot, node=node, pid=os.getpid(), address=address)

    def _lost_supervisors(self) -> Iterable[tuple[int, int]]:
        """Slots and process ids; nothing where it is this one that the others have lost."""
        lost = self._coordinator.lost if self._agreement.has_majority else ()
        return [(slot, self._coordinator.peers[slot].pid) for slot in lost]

    def _answer_status(self, request: Frame) -> Frame:
        return self._board.report(
            view=self._agreement.committed,
            lost=self._coordinator.lost,
            unheard=self._coordinator.unheard.silences,
            peers=self._coordinator.peers,
            standbys=self._reception.standbys(),
            inventory=self._store.inventory(self._data_address),
            progress=self.progress(0.0),
            now_s=time.time(),
        )

    def _answer_drain(self, request: Frame) -> Frame:
        ranks = self._agreement.committed.ranks
        refused = why_it_stays(self._trainer, self._board, ranks, self._slot)
        if refused is None:
            self.drain(str(request["reason"]), asked=True)
        return {"t": "drain", "refused": refused}

    def _answer_migrate(self, request: Frame) -> Frame:
        """Have the trainer's facts name the cuts, and ask for a view between two steps."""
        refused = why_layers_stay(self._trainer, self._board, request["cuts"])
        if refused is None:
            self._trainer.send(said.CutsWanted(cuts=tuple(request["cuts"])))
            self._agreement.replan(str(request["reason"]), time.monotonic())
        return {"t": "migrate", "refused": refused}

    def _answer_where(self, request: Frame) -> Frame:
        """Not in the control loop: it takes long."""
        trainer = self._trainer
        return {"t": "where", "line": where_is(trainer.process.pid, trainer.page.stack_fd)}

    def _on_early_signal(self, number: int, frame: object) -> None:
        sys.exit(128 + number)

    # ---- what the coordinator asks ------------------------------------------------------------

    def ring(self, ring: Ring) -> None:
        """A proposal is open, or has become urgent."""
        trainer, self._ballot = self._trainer, ring.ballot
        self._board.proposed(ring, time.time())
        if trainer.works and (trainer.delivered or (trainer.is_replacement and trainer.facts)):
            proposal = said.Propose(
                epoch=ring.ballot.epoch,
                reason=ring.reason,
                within_s=self._spec.timeouts.quiesce_timeout_s,
                boundary=ring.boundary,
                before_step=ring.before_step,
            )
            trainer.send(proposal)
        elif trainer.works and not trainer.is_replacement:
            if trainer.facts is not None:
                self._answer(trainer.facts)
        else:
            self._answer(None)

    def deliver(self, committed: Committed, path: tuple[MembershipView, ...]) -> None:
        """A view is committed with this worker in it."""
        trainer = self._trainer
        if not trainer.delivered:
            path = tuple(self._agreement.history[1:])
        trainer.delivered = True
        self._board.committed(path, time.time())
        trainer.send(said.NewView(before=path[:-1], view=path[-1], payload=committed.payload))

    def started(self) -> None:
        """Tell all that every trainer has sealed its first snapshot."""
        self._trainer.send(said.Started())

    def dismiss(self) -> None:
        """A view without the trainer is committed, as it was told to leave."""
        self._trainer.left = True
        self._board.dismissed()
        reason = "it has left the job, as it was told to"
        self._trainer.send(Stop(reason=reason, exit_code=0))
        self._reactor.after(GRACE_S, self._trainer.kill)

    def fence(self, evidence: str) -> None:
        """Kill the trainer; its exit is reported with this evidence."""
        self._trainer.fence(evidence)

    def peer_replaced(self, slot: int) -> None:
        """Another supervisor has a slot: copies go there from now on."""
        self._copies.peer_replaced(slot)

    def progress(self, awake_s: float) -> Sample | None:
        """Return how far the trainer is, None where there is none that works."""
        return self._trainer.progress(self._slot, awake_s)

    def lend(self, until_s: float) -> None:
        """The trainer may act for the job until then, by the clock of leases."""
        self._trainer.page.lend(until_s)

    def end(self, reason: str, exit_code: int) -> None:
        """The job is over: exit as soon as the trainer has."""
        self._exit_code = exit_code
        trainer = self._trainer
        view, lost = self._agreement.committed, self._coordinator.lost
        self._sums_up = exit_code == 0 and self._completed > 0 and sums_up(self._slot, view, lost)
        if not trainer.lives:
            self._reactor.stop()
            return
        trainer.send(Stop(reason=reason, exit_code=EXIT_FAILED))
        if trainer.facts is None:
            trainer.ask_to_end(signal.SIGTERM)  # it does not listen to us yet
        self._reactor.after(GRACE_S, self._trainer.kill)

    # ---- what the trainer says ----------------------------------------------------------------

    def _on_trainer_frame(self, trainer: TrainerSession, frame: Frame) -> None:
        try:
            message: said.FromTrainer = from_json(said.FromTrainer, frame)
        except UnreadableMessageError as error:
            trainer.fence(f"it {error}")
            return
        self._board.heard(message)
        match message:
            case said.Join():
                self._on_join(trainer, message)
            case said.Ready():
                trainer.facts = message.facts
                self._events.emit("worker_ready", slot=self._slot, incarnation=trainer.incarnation)
                self._coordinator.enter(wanted=lambda: trainer.works)
            case said.Begun():
                if self._ballot is not None and message.epoch == self._ballot.epoch:
                    self._agreement.begun(self._ballot, message.step)
            case said.SavesLast():
                trainer.saves_last = True
            case said.SetConstants():
                self._job_constants.update(message.what)
            case said.Quiesced():
                if self._ballot is not None and message.epoch == self._ballot.epoch:
                    self._answer(message.facts)
            case said.Sealed():
                self._agreement.first_seal()
                self._copies.send(message.record, message.copy_to)
            case said.Release():
                self._store.release(message.epoch)
                self._agreement.settled(message.epoch)
            case said.Progress():
                self._agreement.progress(time.monotonic())
                self._tell_that_it_is_awaited(message.text)
            case Severed():
                self._agreement.severed(message.epoch, message.evidence, time.monotonic())
            case said.Replan():
                self._agreement.replan(message.reason, time.monotonic())
            case Raised():
                trainer.take_raised(message, sealed=self._store.newest_step())
            case said.Finish():
                self._completed = message.completed
                self._on_finish()
            case said.Leave():
                trainer.left, trainer.returns = True, message.returns
                self._agreement.trainer_failed(message.reason, None, time.monotonic(), kind="leave")
            case said.Abandon():
                self._agreement.abandon(f"worker {self._slot}: {message.reason}", message.exit_code)
            case Detached():
                trainer.missing = message.missing
                if message.trains:
                    self._tell_detached(trainer, trains=True)
            case said.Layout():
                self._agreement.layout = message.layout
            case said.SlowSeen():
                pass  # for the board alone

    def _on_join(self, trainer: TrainerSession, message: said.Join) -> None:
        if trainer.is_replacement:
            view = self._agreement.history[1]
            trainer.send(said.StartDetached(view=view, job_constants=self._job_constants))
            return
        self._deaths = Deaths(limit=message.respawn) if message.respawn else None
        trainer.facts = message.facts
        if self._ballot is not None:
            self._answer(trainer.facts)

    def _tell_detached(self, trainer: TrainerSession, *, trains: bool) -> None:
        self._agreement.detached(Detached(trains=trains, missing=trainer.missing))

    def _on_finish(self) -> None:
        self._trainer.finished = True
        self._agreement.trainer_done(None)
        if self._ballot is not None:
            self._answer(None)
        # Its exit ends the job, and may hang (a thread, a hook at exit).
        self._reactor.after(self._spec.timeouts.finish_grace_s, self._kill_the_finished)

    def _kill_the_finished(self) -> None:
        if self._trainer.lives:
            grace_s = self._spec.timeouts.finish_grace_s
            say(f"worker {self._slot} had finished and did not exit within {grace_s:g} s: killed")
            self._trainer.kill()

    def _tell_that_it_is_awaited(self, phase: str) -> None:
        """Say once a proposal that it is awaited: an announced phase may take minutes."""
        if self._ballot is not None and self._ballot.epoch > self._awaited_epoch:
            self._awaited_epoch = self._ballot.epoch
            self._events.emit(
                "awaited", slot=self._slot, epoch=self._ballot.epoch, announced_phase=phase
            )
            say(f"worker {self._slot} is in an announced phase ({phase}); the others wait for it")

    def _answer(self, facts: Facts | None) -> None:
        self._board.answered()
        if self._ballot is not None:
            inventory = [to_json(one) for one in self._store.inventory(self._data_address)]
            entering = not self._trainer.delivered
            self._agreement.quiesced(self._ballot, facts, inventory, entering=entering)

    # ---- how it ends --------------------------------------------------------------------------

    def _on_start(self, trainer: TrainerSession, pid: int) -> None:
        self._board.started(pid, trainer.incarnation)
        self._on_trainer(pid)
        who = {"slot": self._slot, "incarnation": trainer.incarnation, "pid": pid}
        where = {"node": self._spec.rendezvous.node, "address": self._data_address}
        self._events.emit("worker_started", **who, supervisor_pid=os.getpid(), **where)

    def _on_exit(self, trainer: TrainerSession, status: str, exit_code: int | None) -> None:
        assert trainer.control is not None
        trainer.control.drain()
        trainer.control.close()
        self._on_trainer(0)
        evidence = trainer.fence_evidence or status
        self._board.exited(evidence)
        pid = trainer.process.pid
        # Before any is told, and begins again.
        (self._orphans.end if exit_code == 0 else self._orphans.end_now)(pid)
        who = {"slot": self._slot, "incarnation": trainer.incarnation, "pid": pid}
        self._events.emit("worker_exited", **who, status=status, evidence=evidence)
        if self._exit_code is not None:
            self._reactor.stop()
        elif trainer.finished:
            # A signal after the work was done takes nothing away from it.
            self._agreement.trainer_done(exit_code or 0)
        elif exit_code == 0 and trainer.facts is None and not trainer.is_replacement:
            self._tell_detached(trainer, trains=False)
            self._agreement.trainer_done(0)
        elif not trainer.left:
            sealed, args = self._store.newest_step(), self._spec.program.args
            evidence = trainer.end_of(evidence, exit_code, sealed=sealed, args=args)
            now_s, raised = time.monotonic(), trainer.raised
            self._agreement.trainer_failed(evidence, exit_code, now_s, raised=raised)
            if not trainer.dying:  # before its late exit memory and device are not free
                (self._give_slot_back if trainer.undead else self._replace)(exit_code)
        elif trainer.returns and not trainer.undead:
            self._start_again()
        if self._ballot is not None:
            self._answer(None)

    def _on_late_exit(self, trainer: TrainerSession, status: str, exit_code: int | None) -> None:
        """One that did not die, and counts as gone, has ended after all."""
        who = {"slot": self._slot, "incarnation": trainer.incarnation}
        self._events.emit("worker_exited_late", status=status, **who)
        self._orphans.end_now(trainer.process.pid)
        if trainer.returns:
            self._start_again()
        elif not (trainer.finished or trainer.left):
            self._replace(exit_code)

    def _replace(self, exit_code: int | None) -> None:
        """Start another trainer in the place of the one that failed, where that is sensible."""
        if exit_code == EXIT_CONFIGURATION or self._deaths is None:
            self._give_slot_back(exit_code)
            return
        verdict = self._deaths.after_death(step=self._trainer.reached(self._store.newest_step()))
        fields = {"slot": self._slot, "incarnation": self._trainer.incarnation}
        if isinstance(verdict, GiveUp):
            self._events.emit("respawn_given_up", reason=verdict.reason, **fields)
            say(f"worker {self._slot} is not started again: {verdict.reason}")
            self._give_slot_back(exit_code)
        else:
            self._reactor.after(verdict.after_s, self._start_again_when_past)

    def _start_again_when_past(self) -> None:
        """Not while the others may fail alike, nor in the place of one that was to leave."""
        may_fail_alike = self._trainer.raised is not None and not self._agreement.others_went_on
        wait = may_fail_alike or self._agreement.is_told_to_leave
        if wait and self._exit_code is None:
            self._reactor.after(LOOK_AGAIN_S, self._start_again_when_past)
        elif not self._trainer.left:
            self._start_again()

    def _give_slot_back(self, exit_code: int | None) -> None:
        """A supervisor that came later, and has brought no worker in, leaves the slot to others."""
        is_member = self._slot in self._agreement.committed.ranks
        if self._spec.joins and self._exit_code is None and not is_member:
            say(f"worker {self._slot} could not join: its supervisor leaves the job")
            self._exit_code = exit_code or EXIT_FAILED
            self._agreement.leave("its worker could not join", time.monotonic())
            self._reactor.stop()

    def _start_again(self) -> None:
        if self._exit_code is not None:
            return
        last = self._trainer.process
        if isinstance(last, ZygoteTrainer) and not last.zygote_lives:
            self._zygote = None
        incarnation = self._trainer.incarnation + 1
        say(f"worker {self._slot} is being started again")
        self._agreement.trainer_starts(incarnation)
        self._trainer = self._start_trainer(incarnation)
        self._attach(self._trainer)

    def _on_signal(self, number: int, frame: object) -> None:
        reason = f"its supervisor was told to end by {signal.Signals(number).name}"
        self._reactor.post(partial(self._take_signal, number, reason))

    def _take_signal(self, number: int, reason: str) -> None:
        now_s = time.monotonic()
        self._signalled_s = self._signalled_s or now_s
        again = now_s - self._signalled_s >= AGAIN_S
        (self._leave if again or number == signal.SIGINT else self._heed)(number, reason)

    def _heed(self, number: int, reason: str) -> None:
        """End between two steps where there are any; a scheduler may say so in two ways."""
        if not (self._trainer.lives and self._trainer.delivered):
            self._leave(number, reason)
        elif not self._told:
            self._told = True
            if self._trainer.works:  # else it is about to end by itself
                self.drain(reason)
            leave = partial(self._leave, number, reason)
            self._reactor.after(self._spec.timeouts.notice_timeout_s, leave)

    def drain(self, reason: str, *, asked: bool = False) -> None:
        """Have the trainer leave between two steps, with nothing lost and nothing done twice.

        `asked`: it stays where the job would end without it and nothing is saved.
        """
        self._trainer.send(said.Notice())  # before the change of the view that it leads to
        saves = self._trainer.saves_last
        self._agreement.give_notice(reason, time.monotonic(), saves_last=saves, asked=asked)

    def _leave(self, number: int, reason: str) -> None:
        """The other workers go on without this one, from the state of the last step."""
        if self._exit_code is not None:
            return
        self._exit_code = 128 + number
        self._agreement.leave(reason, time.monotonic())
        if self._trainer.lives:
            self._trainer.ask_to_end(number)
            self._reactor.after(GRACE_S, self._trainer.kill)
        else:
            self._reactor.stop()
