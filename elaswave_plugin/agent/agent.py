"""A node's agent: its part in the job, the trainers of its slots, and their snapshots.

It dies without harm: its guardian holds what the next one needs, and the trainers call that one.
Standard library only. Control is one thread (the reactor); bulk bytes have threads of their own.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

from elaswave_plugin.agent.common import AgentSpec, Common
from elaswave_plugin.agent.keeper import Keeper, Notice
from elaswave_plugin.agent.notice_file import watch_notice_file
from elaswave_plugin.agent.peers.coordinator import Coordinator
from elaswave_plugin.agent.peers.job_lease import JobLease
from elaswave_plugin.agent.peers.job_summary import Changes, job_summary, sums_up
from elaswave_plugin.agent.peers.links import LINK
from elaswave_plugin.agent.peers.rendezvous import (
    EndedEarlyError,
    Meeting,
    host_meeting,
    join_meeting,
)
from elaswave_plugin.agent.reception import Reception
from elaswave_plugin.agent.seat import SECRET, Seat
from elaswave_plugin.agent.snapshot_server import SnapshotServer
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.agent.standby import Standby
from elaswave_plugin.agent.trainer_session import describe_change
from elaswave_plugin.agent.way_in import Admitted, SlotRefusedError, env_in, seek_admission
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Deliver,
    Dismiss,
    Fence,
    Order,
    Over,
    Ring,
    Seated,
    Vacated,
)
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.view import WorkerId
from elaswave_plugin.core.codec import from_json, to_json
from elaswave_plugin.core.layout.reserve import vacant
from elaswave_plugin.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_LEFT_OUT,
    EXIT_REQUEUE,
    AgreementError,
    ConfigurationError,
)
from elaswave_plugin.ipc.address_file import Address, clear_addresses, published
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.frames import SAY, TRAINER
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.relay import RELAY, carry
from elaswave_plugin.ipc.requests import in_loop
from elaswave_plugin.ipc.stack_line import where_is
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import Frame, send_frame
from elaswave_plugin.tracking.events import AsyncLog

GOODBYE_S = 1.0


class Agent:
    """One life of a node's agent; `run` returns the exit code of the job, as far as it goes here.

    `life`: how many agents the node has had before.
    """

    def __init__(
        self,
        spec: AgentSpec,
        keeper: Keeper,
        *,
        life: int,
        listener: socket.socket | None,
        data: tuple[socket.socket, socket.socket],
    ) -> None:
        """`listener`: where the others come to, on the first node; `data`: of the server."""
        self._spec, self._first_envs = spec, spec.envs
        self._keeper = keeper
        self._life = life
        self._listener = listener
        self._reactor = Reactor()
        store = SnapshotStore(keeper)
        self._server = self._make_server(store, data)
        self._common = Common(
            spec=spec,
            reactor=self._reactor,
            keeper=keeper,
            store=store,
            events=AsyncLog(f"{spec.run_dir}/events.jsonl" if spec.run_dir else None),
            address=self._server.address,
            on_change=self._store,
            on_idle=self._stop_when_idle,
        )
        self._seats: dict[int, Seat] = {}
        self._record: Record | None = None
        self._sums_up = False
        # With which the whole job has ended, where it has.
        self._job_code: int | None = None
        self._stops = False
        self._keep_secret()

    def run(self) -> int:
        """Take part until the job is over."""
        set_title(f"agent of node {self._spec.rendezvous.node}")
        stored = self._keeper.load()
        # Trainers come before the others have met; what they say waits until then.
        self._server.start()
        links: list[tuple[Peer, socket.socket]]
        self._job_lease = self._begin_job_lease()
        try:
            if stored is not None:
                agreement, links = self._resumed(stored), []
            elif self._spec.joins:
                agreement, links = self._join()
            else:
                agreement, links = self._meet()
        except SlotRefusedError as error:
            say(f"node {self._spec.rendezvous.node} does not join: {error}")
            return error.exit_code
        except (AgreementError, ConfigurationError) as error:
            say(f"the job does not start: {error}")
            if isinstance(error, EndedEarlyError):
                return EXIT_FAILED
            bad_input = isinstance(error, ConfigurationError)
            return EXIT_CONFIGURATION if bad_input else EXIT_REQUEUE
        common, spec = self._common, self._spec
        own = Peer(node=agreement.node, pid=os.getpid(), life=self._life, data=self._server.address)
        common.coordinator = self._coordinator = Coordinator(
            self._reactor,
            agreement,
            own,
            secret=spec.rendezvous.secret,
            heartbeat=spec.heartbeat,
            trainer_side=self,
            store=self._store,
            events=common.events,
            job_lease=self._job_lease,
        )
        # From now on the guardian hands it on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._agreement = agreement
        self._reception = Reception(common)
        self._standby = Standby(common)
        if stored is not None:
            self._coordinator.go_on(from_json(Changes, stored["changes"]))
            self._resume_seats(stored)
        self._keeper.watch(self._reactor, self._on_notice)
        if spec.notice_file:
            watch_notice_file(self._reactor, spec.notice_file, self._heed)
        address = published(spec.run_dir, self._address(), self._has_left)
        # Also where it crashes: its last events say most.
        with closing(common.events), address:
            common.events.emit(
                "agent_started",
                node=agreement.node,
                pid=os.getpid(),
                life=self._life,
                guardian_pid=os.getppid(),
            )
            self._coordinator.start(links)
            self._standby.start()
            self._reactor.run()
        self._coordinator.finish(GOODBYE_S)
        if self._sums_up:
            changes, started_s = self._coordinator.changes, common.constants["started_s"]
            say(job_summary(changes, common.completed, started_s, spec.run_dir))
        return EXIT_FAILED if common.exit_code is None else common.exit_code

    def _begin_job_lease(self) -> JobLease | None:
        """Renew the lease of the job from now on, where it has one and this node begins it."""
        spec = self._spec
        if spec.job_place is None:
            return None
        lease = JobLease(
            spec.job_place.lease(spec.rendezvous.secret),
            spec.job_life,
            self._reactor,
            leads=self._listener is not None,
            on_over=lambda why: self._agreement.abandon(why, EXIT_LEFT_OUT),
        )
        lease.start()
        return lease

    # ---- the ways into a job ------------------------------------------------------------------

    def _meet(self) -> tuple[Agreement, list[tuple[Peer, socket.socket]]]:
        """Meet the others of the launch; trainers start first, as their imports take longest."""
        spec, rendezvous = self._spec, self._spec.rendezvous
        for place, slot in enumerate(rendezvous.slots):
            self._seats[slot] = seat = Seat(self._common, slot, place)
            seat.start(0)
        own = Peer(
            node=rendezvous.node, pid=os.getpid(), life=self._life, data=self._server.address
        )
        if self._listener is not None:
            clear_addresses(spec.run_dir)
            # Closed after the meeting: the port is the script's to use.
            with self._listener:
                meeting = host_meeting(rendezvous, self._listener, own)
        else:
            meeting = join_meeting(rendezvous, own)
        return self._first_part(meeting), meeting.links

    def _first_part(self, meeting: Meeting) -> Agreement:
        agreement = Agreement(
            node=self._spec.rendezvous.node,
            nodes=meeting.of_slots,
            timeouts=self._spec.timeouts,
            life=self._life,
        )
        agreement.addresses = dict(meeting.addresses)
        return agreement

    def _join(self) -> tuple[Agreement, list[tuple[Peer, socket.socket]]]:
        """Take slots of a job that runs, and start their trainers."""
        spec = self._spec
        admitted: Admitted = seek_admission(spec, self._server.address, life=self._life)
        self._spec = self._common.spec = admitted.spec
        self._common.constants = admitted.kept["job_constants"]
        self._common.respawn = int(admitted.kept["respawn"])
        agreement = Agreement.of_newcomer(
            admitted.welcome,
            admitted.spec.rendezvous.node,
            timeouts=spec.timeouts,
            life=self._life,
        )
        for place, worker in enumerate(admitted.welcome.workers):
            self._seats[worker.slot] = seat = Seat(self._common, worker.slot, place)
            seat.start(worker.incarnation)
        return agreement, admitted.links

    def _resumed(self, stored: Frame) -> Agreement:
        record: Record = from_json(Record, stored["record"])
        self._common.constants, self._common.respawn = stored["constants"], stored["respawn"]
        self._spec = self._common.spec = _as_stored(self._spec, stored)
        return Agreement.of_next_life(
            record,
            int(stored["node"]),
            timeouts=self._spec.timeouts,
            life=self._life,
            now_s=time.monotonic(),
        )

    def _resume_seats(self, stored: Frame) -> None:
        """Go on with the trainers that an earlier life had started; they call again."""
        known = {
            (one["slot"], one["incarnation"]): (one, fd) for one, fd in self._keeper.trainers()
        }
        trainers: dict[int, Notice | None] = {}
        for slot, kept in ((int(slot), kept) for slot, kept in stored["seats"].items()):
            if slot not in self._agreement.seats:
                continue
            self._standby.taken(kept["place"])
            self._seats[slot] = seat = Seat(self._common, slot, kept["place"])
            incarnation = self._agreement.seats[slot].incarnation
            trainers[slot], pidfd = known.pop((slot, incarnation), (None, -1))
            seat.resume(incarnation, trainers[slot], pidfd, kept)
        # Only now: to store some of the seats would be to forget the others.
        self._store(from_json(Record, stored["record"]))
        for slot, trainer in trainers.items():
            self._seats[slot].go_on(trainer)

    # ---- what the guardian tells --------------------------------------------------------------

    def _on_notice(self, notice: Notice, fd: int) -> None:
        if notice["n"] == "signal":
            self._on_signal(notice["number"], notice["place"])
            return
        seat = self._seats.get(notice["slot"])
        if seat is None or seat.knows(notice):
            if fd >= 0:
                os.close(fd)
        elif notice["n"] == "started":
            seat.on_start(notice, fd)
            self._coordinator.lend()
        else:
            seat.on_end(notice["end"])

    def _on_signal(self, number: int, place: int | None) -> None:
        reason = f"it was told to end by {signal.Signals(number).name}"
        for seat in [one for one in self._seats.values() if place in (None, one.place)]:
            seat.take_signal(number, reason)
        if not self._seats:
            self._common.exit_code = 128 + number
            self._stop()

    def _heed(self, reason: str) -> None:
        for seat in list(self._seats.values()):
            seat.heed(signal.SIGTERM, reason)

    # ---- what outlives this life --------------------------------------------------------------

    def _keep_secret(self) -> None:
        fd = self._keeper.memory(SECRET)
        if not os.fstat(fd).st_size:
            os.pwrite(fd, self._spec.rendezvous.secret.value, 0)
        os.close(fd)

    def _store(self, record: Record | None = None) -> None:
        """Keep what the next life begins with; without a record, with the last one."""
        self._record = self._record if record is None else record
        if self._record is None:
            return
        stored = {
            "node": self._spec.rendezvous.node,
            "record": self._record,
            "constants": self._common.constants,
            "respawn": self._common.respawn,
            "changes": self._coordinator.changes,
            "seats": {slot: seat.kept for slot, seat in self._seats.items()},
            "envs": [
                dict(env.items() - first.items())
                for env, first in zip(self._spec.envs, self._first_envs, strict=True)
            ],
        }
        self._keeper.store(json.dumps(stored, default=to_json).encode())

    # ---- requests -----------------------------------------------------------------------------

    def _make_server(
        self, store: SnapshotStore, data: tuple[socket.socket, socket.socket]
    ) -> SnapshotServer:
        answers = {
            "status": self._answer_status,
            "drain": lambda request: self._seat_of(request).answer_drain(request),
            "migrate": lambda request: self._seat_of(request).answer_migrate(request),
            "roster": lambda request: self._reception.answer_roster(request),
            "kept": lambda request: self._reception.answer_kept(request),
            "admit": lambda request: self._reception.answer_admit(request),
            SAY: lambda request: self._seat_of(request).hear(request),
        }
        in_turn = {name: in_loop(self._reactor, answer) for name, answer in answers.items()}
        relay = partial(carry, self._known_addresses)
        return SnapshotServer(
            store,
            data,
            {**in_turn, "where": self._answer_where},
            {LINK: self._take_link, TRAINER: self._take_trainer, RELAY: relay},
            secret=self._spec.rendezvous.secret,
        )

    def _known_addresses(self) -> set[str]:
        """Those of the job's agents; none before it takes part."""
        return {*self._agreement.addresses.values()} if hasattr(self, "_agreement") else set()

    def _take_link(self, request: Frame, sock: socket.socket) -> None:
        """From a server's thread: the link of another agent."""
        peer: Peer = from_json(Peer, request["peer"])

        def take() -> None:
            if not self._agreement.nodes.lives(peer.node):
                why = f"node {peer.node} has no part in the job, as far as is known here"
                send_frame(sock, {"t": "link", "error": why})
                sock.close()
                return
            own = self._coordinator.own
            send_frame(sock, {"t": "linked", "peer": own, "epoch": self._coordinator.epoch})
            self._coordinator.take_link(peer, sock, int(request["epoch"]))

        self._reactor.post(take)

    def _take_trainer(self, request: Frame, sock: socket.socket) -> None:
        """From a server's thread: the control link of a trainer of this node."""
        slot, incarnation = int(request["slot"]), int(request["incarnation"])

        def take() -> None:
            seat = self._seats.get(slot)
            if seat is None:
                sock.close()
            else:
                seat.called(incarnation, int(request["epoch"]), sock)

        self._reactor.post(take)

    def _seat_of(self, request: Frame) -> Seat:
        slot = int(request["slot"])
        if slot not in self._seats:
            raise LookupError(f"worker {slot} is not of node {self._spec.rendezvous.node}")
        return self._seats[slot]

    def _answer_where(self, request: Frame) -> Frame:
        """Not in the control loop: it takes long."""
        trainer = self._seat_of(request).trainer
        return {"t": "where", "line": where_is(trainer.pid, trainer.page.stack_fd)}

    def _answer_status(self, request: Frame) -> Frame:
        agreement, now_s = self._agreement, time.time()
        view = agreement.committed
        workers = [seat.status(now_s) for _, seat in sorted(self._seats.items())]
        # It is decided a moment before the trainers are told.
        told: list[Frame] = max((one["views"] for one in workers), key=len, default=[])
        is_newer = view.epoch > (told[-1]["epoch"] if told else 0)
        inventory = self._common.store.inventory(self._server.address)
        return {
            "t": "status",
            "node": agreement.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "life": self._life,
            "leader": agreement.leader,
            "workers": workers,
            "view": to_json(view),
            "views": [*told, *([describe_change(view, now_s)] if is_newer else [])],
            "lost": [
                {"slot": slot, "evidence": evidence}
                for slot, evidence in agreement.nodes.without_agent.items()
                if slot not in vacant(agreement.nodes.of_slots)
            ],
            "unheard": [one._asdict() for one in self._coordinator.unheard.silences],
            "vacant": list(vacant(agreement.nodes.of_slots)),
            "nodes": list(agreement.nodes.of_slots),
            "addresses": {str(node): one for node, one in agreement.addresses.items()},
            "snapshots": [
                {key: getattr(one, key) for key in ("owner", "step", "epoch", "length", "holder")}
                for one in inventory
            ],
            "standby_places": self._standby.waiting,
        }

    def _address(self) -> Address:
        node = self._spec.rendezvous.node
        return Address(node=node, pid=os.getpid(), address=self._server.address)

    def _has_left(self, node: int) -> bool:
        """Return whether a node is lost; none where it is this one that the others have lost."""
        return self._agreement.has_majority and not self._agreement.nodes.lives(node)

    # ---- what the coordinator asks ------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """Have the seats do what the agreement orders."""
        match order:
            case Ring():
                for seat in self._seats.values():
                    seat.ring(order)
            case Deliver():
                for slot in list(self._agreement.seats):
                    if self._agreement.worker(slot) in order.committed.proposal.view:
                        self._seats[slot].deliver(order)
            case Dismiss():
                self._seats[order.slot].dismiss()
            case Fence():  # its exit is reported with this evidence
                self._seats[order.slot].trainer.fence(order.evidence)
            case Seated():
                self._seat(order.worker)
            case Vacated():
                self._vacated()
            case Over():
                self._end(order.reason, order.exit_code)

    def started(self) -> None:
        """Tell all that every trainer has sealed its first snapshot."""
        for seat in self._seats.values():
            seat.trainer.send(AllSealed())

    def _seat(self, worker: WorkerId) -> None:
        """Start the first trainer of a slot that was given to this node."""
        place = self._standby.place_for(worker.slot)
        self._spec = self._common.spec = _with_place(self._spec, place, worker.slot)
        self._seats[worker.slot] = seat = Seat(self._common, worker.slot, place)
        seat.start(worker.incarnation)
        self._store()

    def _vacated(self) -> None:
        """Another node may take a slot; its trainer is ending, or has ended."""
        self._store()
        if not self._agreement.seats and not self._standby.waiting:
            self._common.exit_code = self._common.exit_code or EXIT_FAILED
        self._stop_when_idle()

    def progress(self, awake_s: float) -> list[Sample]:
        """Return how far the trainers are that work."""
        found = (seat.trainer.progress(awake_s) for seat in self._seats.values())
        return [one for one in found if one is not None]

    def lend(self, until_s: float) -> None:
        """The trainers may act for the job until then, by the clock of leases."""
        for seat in self._seats.values():
            seat.trainer.page.lend(until_s)

    def _end(self, reason: str, exit_code: int) -> None:
        """The job is over: exit as soon as the trainers have."""
        common = self._common
        common.exit_code = exit_code
        view, lost = self._agreement.committed, self._agreement.nodes.lost
        # One that is cut off cannot tell whether the others go on, unless all have told their end.
        is_sure = self._agreement.all_ended or self._coordinator.is_counted_in
        if exit_code != EXIT_LEFT_OUT and self._agreement.node in view.nodes and is_sure:
            self._job_code = exit_code
        ended_well = exit_code == 0 and common.completed > 0
        self._sums_up = ended_well and sums_up(self._agreement.node, view, lost)
        for seat in self._seats.values():
            seat.end(reason)
        self._stop_when_idle()

    def _stop_when_idle(self) -> None:
        """End once the job is over here, or nothing is left to do, and no trainer lives."""
        for slot, seat in list(self._seats.items()):
            if slot not in self._agreement.seats and not seat.trainer.life.lives:
                self._seats.pop(slot).close()
        lives = any(seat.trainer.life.lives for seat in self._seats.values())
        if self._common.exit_code is not None and not lives:
            self._stop()

    def _stop(self) -> None:
        """Leave the loop, once the end of the job is in its record, where it has one."""
        if self._job_lease is None:
            self._reactor.stop()
        elif not self._stops:
            self._job_lease.finish(self._job_code, self._reactor.stop)
        self._stops = True


def _as_stored(spec: AgentSpec, stored: Frame) -> AgentSpec:
    """The spec with the number that the job has given the node, and with what changed of places."""
    envs = tuple({**env, **more} for env, more in zip(spec.envs, stored["envs"], strict=True))
    rendezvous = replace(spec.rendezvous, node=int(stored["node"]))
    return replace(spec, rendezvous=rendezvous, envs=envs)


def _with_place(spec: AgentSpec, place: int, slot: int) -> AgentSpec:
    """The spec with what a slot makes of torchrun's variables in a place."""
    env = env_in(spec.envs[place], slot, spec.rendezvous.node)
    return replace(spec, envs=(*spec.envs[:place], env, *spec.envs[place + 1 :]))


def ended_early(number: int, frame: object) -> None:
    """End before there is a job, by a signal."""
    sys.exit(128 + number)
