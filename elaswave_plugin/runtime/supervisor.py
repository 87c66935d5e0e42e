"""One worker's supervisor: it owns the trainer and its snapshot memory, and outlives the trainer.

Standard library only. Control is one thread (the reactor); bulk bytes have threads of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from elaswave_plugin.core.agreement import EXIT_FAILED, EXIT_REQUEUE, Patience
from elaswave_plugin.core.agreement_messages import Ballot, Committed, Facts
from elaswave_plugin.core.membership import MembershipView
from elaswave_plugin.errors import AgreementError
from elaswave_plugin.runtime.coordinator import Coordinator, Heartbeat, say
from elaswave_plugin.runtime.lifeline import signal_group
from elaswave_plugin.runtime.member import HOST, INCARNATION, SLOT
from elaswave_plugin.runtime.reactor import Reactor
from elaswave_plugin.runtime.rendezvous import Meeting, Place, host_meeting, join_meeting
from elaswave_plugin.runtime.snapshot_server import SnapshotCopier, SnapshotServer
from elaswave_plugin.runtime.snapshot_store import SnapshotStore
from elaswave_plugin.runtime.trainer_process import ExecTrainer, Program, ZygoteTrainer
from elaswave_plugin.runtime.wire import Channel, Frame
from elaswave_plugin.tracking.events import EventLog

GRACE_S = 2.0
GOODBYE_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """Everything a supervisor is told when it starts; at `host` the others reach this machine."""

    place: Place
    host: str
    program: Program
    env: Mapping[str, str]
    run_dir: str | None = None
    patience: Patience = field(default_factory=Patience)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


class Supervisor:
    """Runs one trainer for one job; `run` returns the exit code."""

    def __init__(
        self,
        spec: SupervisorSpec,
        *,
        listener: socket.socket | None,
        zygote: socket.socket | None,
    ) -> None:
        self._spec = spec
        self._slot = spec.place.slot
        self._listener = listener
        self._reactor = Reactor()
        self._store = SnapshotStore(self._slot)
        self._copiers: dict[int, SnapshotCopier] = {}
        self._events = EventLog(f"{spec.run_dir}/events.jsonl" if spec.run_dir else None)
        self._ballot: Ballot | None = None
        self._join_facts: Facts | None = None
        self._awaited_epoch = 0
        self._delivered = False
        self._finished = False
        self._left = False
        self._trainer_lives = True
        self._fence_evidence: str | None = None
        self._orphans_of: int | None = None
        self._exit_code: int | None = None
        self._trainer, self._control_sock = self._start_trainer(zygote)

    def run(self) -> int:
        """Supervise until the job is over."""
        for number in _SIGNALS:
            signal.signal(number, self._on_early_signal)
        try:
            meeting = self._meet()
        except AgreementError as error:
            say(f"the job does not start: {error}")
            self._trainer.send_signal(signal.SIGKILL)
            return EXIT_REQUEUE
        self._meeting = meeting
        self._control = Channel(
            self._reactor,
            self._control_sock,
            on_frame=self._on_trainer_frame,
            on_close=self._on_control_closed,
        )
        self._coordinator = Coordinator(
            self._reactor,
            meeting,
            slot=self._slot,
            patience=self._spec.patience,
            heartbeat=self._spec.heartbeat,
            trainer_side=self,
            events=self._events,
        )
        self._agreement = self._coordinator.agreement
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        self._trainer.attach(self._reactor, on_start=self._on_start, on_exit=self._on_exit)
        self._reactor.run()
        self._kill_orphans()
        self._coordinator.finish(GOODBYE_S)
        return EXIT_FAILED if self._exit_code is None else self._exit_code

    # ---- start --------------------------------------------------------------------------------

    def _start_trainer(
        self, zygote: socket.socket | None
    ) -> tuple[ExecTrainer | ZygoteTrainer, socket.socket]:
        """Before anything else: its imports take longest, and no thread runs here yet."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = {**self._spec.env, SLOT: str(self._slot), INCARNATION: "0", HOST: self._spec.host}
        trainer: ExecTrainer | ZygoteTrainer
        if zygote is None:
            trainer = ExecTrainer(
                self._spec.program, env=env, control=theirs, snapshot_fds=self._store.fds
            )
        else:
            trainer = ZygoteTrainer(
                self._spec.program,
                env=env,
                control=theirs,
                snapshot_fds=self._store.fds,
                zygote=zygote,
            )
        theirs.close()
        return trainer, own

    def _meet(self) -> Meeting:
        if self._listener is not None:
            with self._listener:  # closed after the meeting: the port is the script's to use
                return host_meeting(self._spec.place, self._listener, self._open_data())
        return join_meeting(self._spec.place, self._spec.host, self._open_data())

    def _open_data(self) -> str:
        server = SnapshotServer(self._store, self._spec.host)
        server.start()
        self._data_address = server.address
        return server.address

    def _on_early_signal(self, number: int, frame: object) -> None:
        sys.exit(128 + number)

    # ---- what the coordinator asks ------------------------------------------------------------

    def ring(self, ballot: Ballot, reason: str) -> None:
        """A proposal is open."""
        self._ballot = ballot
        if not self._trainer_lives or self._finished or self._left:
            self._answer(None)
        elif self._delivered:
            within_s = self._spec.patience.quiesce_timeout_s
            frame = {"t": "propose", "epoch": ballot.epoch, "reason": reason, "within_s": within_s}
            self._control.send(frame)
        elif self._join_facts is not None:
            self._answer(self._join_facts)

    def deliver(self, committed: Committed, path: tuple[MembershipView, ...]) -> None:
        """A view is committed with this worker in it."""
        self._delivered = True
        self._control.send(
            {
                "t": "commit",
                "path": [view.to_json() for view in path],
                "payload": committed.payload,
            }
        )

    def fence(self, evidence: str) -> None:
        """Kill the trainer; its exit is reported with this evidence."""
        self._fence_evidence = evidence
        self._trainer.send_signal(signal.SIGKILL)

    def end(self, reason: str, exit_code: int) -> None:
        """The job is over: exit as soon as the trainer has."""
        self._exit_code = exit_code
        if not self._trainer_lives:
            self._reactor.stop()
            return
        self._control.send({"t": "stop", "reason": reason})
        if self._join_facts is None:
            self._trainer.send_signal(signal.SIGTERM)  # it does not listen to us yet
        self._kill_after_grace()

    # ---- what the trainer says ----------------------------------------------------------------

    def _on_trainer_frame(self, frame: Frame) -> None:
        match frame["t"]:
            case "join":
                self._join_facts = frame["facts"]
                if self._ballot is not None:
                    self._answer(self._join_facts)
            case "quiesced":
                if self._ballot is not None and frame["epoch"] == self._ballot.epoch:
                    self._answer(frame["facts"])
            case "sealed":
                self._on_sealed(frame)
            case "release":
                self._store.release(int(frame["epoch"]))
            case "progress":
                self._agreement.progress(time.monotonic())
                self._tell_that_it_is_awaited(frame["text"])
            case "severed":
                self._agreement.severed(int(frame["epoch"]), frame["evidence"], time.monotonic())
            case "finish":
                self._on_finish()
            case "leave":
                self._left = True
                self._agreement.trainer_failed(
                    frame["reason"], None, time.monotonic(), kind="leave"
                )
            case "abandon":
                self._agreement.abandon(
                    f"worker {self._slot}: {frame['reason']}", int(frame["exit_code"])
                )

    def _on_sealed(self, frame: Frame) -> None:
        self._agreement.first_seal()
        for target in frame["copy_to"]:
            if target not in self._copiers:
                self._copiers[target] = SnapshotCopier(
                    self._store,
                    self._meeting.peers[target].data,
                    same_node=self._meeting.peers[target].node == self._spec.place.node,
                    on_copied=partial(self._post_copied, target),
                    on_broken=partial(self._post_broken, target),
                )
            self._copiers[target].send(frame["record"])

    def _on_finish(self) -> None:
        self._finished = True
        self._agreement.trainer_done(None)
        if self._ballot is not None:
            self._answer(None)
        # Its exit ends the job, and may hang (a thread, a hook at exit).
        self._reactor.after(self._spec.patience.finish_grace_s, self._kill_the_finished)

    def _kill_the_finished(self) -> None:
        if self._trainer_lives:
            grace_s = self._spec.patience.finish_grace_s
            say(f"worker {self._slot} had finished and did not exit within {grace_s:g} s: killed")
            self._trainer.send_signal(signal.SIGKILL)

    def _tell_that_it_is_awaited(self, phase: str) -> None:
        """Once a proposal: an announced phase may keep everyone waiting for minutes."""
        if self._ballot is not None and self._ballot.epoch > self._awaited_epoch:
            self._awaited_epoch = self._ballot.epoch
            self._events.emit(
                "awaited", slot=self._slot, epoch=self._ballot.epoch, announced_phase=phase
            )
            say(f"worker {self._slot} is in an announced phase ({phase}); the others wait for it")

    def _post_copied(self, target: int, step: int, epoch: int) -> None:
        frame = {"t": "copied", "step": step, "epoch": epoch, "slot": target}
        self._reactor.post(partial(self._control.send, frame))

    def _post_broken(self, target: int, why: str) -> None:
        # The end of the target itself comes over its control link; this is only for the record.
        self._events.emit("copy_broken", slot=self._slot, to=target, why=why)

    def _answer(self, facts: Facts | None) -> None:
        if self._ballot is not None:
            inventory = self._store.inventory(self._data_address)
            self._agreement.quiesced(self._ballot, facts, inventory)

    # ---- how it ends --------------------------------------------------------------------------

    def _on_start(self, pid: int) -> None:
        node = self._spec.place.node
        self._events.emit(
            "worker_started", slot=self._slot, pid=pid, supervisor_pid=os.getpid(), node=node
        )

    def _on_control_closed(self, evidence: str) -> None:
        """The trainer closed its end; what matters is how the process ends, and that comes."""

    def _on_exit(self, status: str, exit_code: int | None) -> None:
        self._control.drain()
        self._control.close()
        self._trainer_lives = False
        evidence = self._fence_evidence or status
        self._events.emit(
            "worker_exited",
            slot=self._slot,
            pid=self._trainer.pid,
            status=status,
            evidence=evidence,
        )
        if self._exit_code is not None:
            self._reactor.stop()
        elif self._finished:
            # A signal after the work was done takes nothing away from it.
            self._agreement.trainer_done(exit_code or 0)
        elif exit_code == 0 and self._join_facts is None:
            self._agreement.trainer_done(0)
        elif not self._left:
            if exit_code == 0:
                evidence = "exit code 0 before its work was finished"
            self._agreement.trainer_failed(evidence, exit_code, time.monotonic())
        if self._ballot is not None:
            self._answer(None)
        if exit_code != 0:
            self._end_orphans()

    def _on_signal(self, number: int, frame: object) -> None:
        self._reactor.post(partial(self._leave, number))

    def _leave(self, number: int) -> None:
        """Told to end by a signal: the other workers go on without this one."""
        if self._exit_code is not None:
            return
        self._exit_code = 128 + number
        name = signal.Signals(number).name
        self._agreement.leave(f"its supervisor was told to end by {name}", time.monotonic())
        if self._trainer_lives:
            self._trainer.send_signal(number)
            self._kill_after_grace()
        else:
            self._reactor.stop()

    def _end_orphans(self) -> None:
        """End what a trainer that died had started (a checkpoint writer, a data loader).

        Only a group that still has members is signalled again, so that its number is not reused.
        """
        if self._trainer.pid and signal_group(self._trainer.pid, signal.SIGTERM):
            self._orphans_of = self._trainer.pid
            self._reactor.after(GRACE_S, self._kill_orphans)

    def _kill_orphans(self) -> None:
        if self._orphans_of is not None:
            signal_group(self._orphans_of, signal.SIGKILL)
            self._orphans_of = None

    def _kill_after_grace(self) -> None:
        self._reactor.after(GRACE_S, partial(self._trainer.send_signal, signal.SIGKILL))
