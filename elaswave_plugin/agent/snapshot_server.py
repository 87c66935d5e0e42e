"""Serves sealed snapshots and takes copies, in threads that never delay the control loop."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from elaswave_plugin.agent.common import Common
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.core.codec import UnreadableMessageError, WireMessage, from_json
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.ipc.frames import Copied, Copying
from elaswave_plugin.ipc.peer import near_name
from elaswave_plugin.ipc.relay import connect_by
from elaswave_plugin.ipc.requests import Answer
from elaswave_plugin.ipc.secret import (
    HandshakeError,
    Kind,
    Secret,
    Strangers,
    admit,
    is_same_user,
    prove,
)
from elaswave_plugin.ipc.silence import LIMIT_S, answers, have_probed
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, NOTES
from elaswave_plugin.ipc.wire import (
    Check,
    Frame,
    probe_when_silent,
    receive_frame,
    receive_into,
    send_frame,
)

_MALFORMED = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
Taker = Callable[[Frame, socket.socket], None]
STALL_S = 30.0
IDLE_S = 86400.0
ACCEPT_AGAIN_S = 0.05
COPY_AGAIN_S = 0.2
_LOOK_EVERY_S = 1
_REQUEST_BYTES = 1 << 20
TELL_EVERY_S = 0.2
_PIECE_BYTES = 1 << 20


class SnapshotServer:
    """Accepts connections at both of `listeners`; `address` is that of the first, "host:port".

    Everybody proves `secret` first. Processes of this machine may come by a Unix socket of the
    abstract namespace, by which they are handed descriptors. `others` answer the requests of other
    kinds, by the name of the kind; `takers` are given the connection itself with the request.
    """

    def __init__(
        self,
        store: SnapshotStore,
        listeners: tuple[socket.socket, socket.socket],
        others: Mapping[str, Answer] | None = None,
        takers: Mapping[str, Taker] | None = None,
        *,
        secret: Secret,
    ) -> None:
        self._store = store
        self._secret = secret
        self._others = dict(others or {})
        self._takers = dict(takers or {})
        self._listeners = listeners
        host, port = listeners[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        self._strangers = Strangers(self.address)

    def start(self) -> None:
        """Serve in daemon threads, one a connection."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="snapshot-server", daemon=True
            ).start()

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                sock, _ = listener.accept()
            except OSError:
                # Not only where it is closed: a process may be out of descriptors for a moment.
                time.sleep(ACCEPT_AGAIN_S)
                continue
            peer = threading.Thread(
                target=self._serve, args=(sock,), name="snapshot-peer", daemon=True
            )
            try:
                peer.start()
            except RuntimeError:  # no more threads: the peer asks again
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                with self._strangers.one(sock):
                    if sock.family is socket.AF_UNIX and not is_same_user(sock):
                        raise HandshakeError(
                            "the process that dials is of another user of this machine"
                        )
                    admit(sock, self._secret, Kind.SERVER)
                if sock.family is not socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                probe_when_silent(sock)
                while True:
                    request = receive_frame(sock, IDLE_S, longest_bytes=_REQUEST_BYTES)
                    if request["t"] == "fetch":
                        self._answer_fetch(sock, request)
                    elif request["t"] == "share":
                        self._share(sock, request)
                    elif request["t"] == "copy":
                        self._take_copy(sock, request)
                    elif request["t"] in self._others:
                        send_frame(sock, self._others[request["t"]](request))
                    elif request["t"] in self._takers:
                        self._takers[request["t"]](request, sock.dup())
                        return
                    else:
                        raise UnreadableMessageError(request["t"])
            except HandshakeError as error:
                self._strangers.refuse(error)
            except OSError:
                return  # the peer is gone or stuck; an unfinished copy has never become a record
            except _MALFORMED as error:
                self._strangers.refuse(f"no request: {error!r:.200}")

    def _open(self, sock: socket.socket, request: Frame) -> tuple[int, int] | None:
        """Find what is asked for, or answer that it is not here."""
        of = {name: request[name] for name in ("owner", "step", "epoch")}
        found = self._store.open(**of, notes=bool(request.get("notes")))
        if found is None:
            send_frame(sock, {"t": "bytes", "error": "no such sealed snapshot here"})
        return found

    def _share(self, sock: socket.socket, request: Frame) -> None:
        """Hand the memory itself to a process of this node."""
        found = self._open(sock, request)
        if found is None:
            return
        fd, length = found
        try:
            send_frame(sock, {"t": "shared", "length": length})
            socket.send_fds(sock, [b"\0"], [fd])
        finally:
            os.close(fd)

    def _answer_fetch(self, sock: socket.socket, request: Frame) -> None:
        found = self._open(sock, request)
        if found is None:
            return
        fd, length = found
        try:
            start, count = int(request["offset"]), int(request["length"])
            if start < 0 or start + count > length:
                error = f"bytes {start}..{start + count} of a snapshot of {length} bytes"
                send_frame(sock, {"t": "bytes", "error": error})
                return
            send_frame(sock, {"t": "bytes"})
            send_memory(sock, fd, BODY_OFFSET + start, count)
        finally:
            os.close(fd)

    def _take_copy(self, sock: socket.socket, request: Frame) -> None:
        record: SealedShard = from_json(SealedShard, request["record"])
        stop = partial(sock.shutdown, socket.SHUT_RDWR)
        body = self._store.begin_copy(record, int(request["holder"]), stop)
        whole = False
        try:
            for start in range(0, len(body), _PIECE_BYTES):
                piece = body[start : start + _PIECE_BYTES]
                receive_into(sock, piece, time.monotonic() + STALL_S)
            whole = bool(receive_frame(sock, STALL_S)["sealed"])
        finally:
            self._store.end_copy(record, whole=whole)
        send_frame(sock, {"t": "copied", "held": whole})


def listen_for_data(host: str) -> tuple[socket.socket, socket.socket]:
    """Listeners for a `SnapshotServer`: at a free port of `host`, and a Unix socket beside it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    far = socket.create_server((host, 0), family=family, backlog=256)
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    near.bind(near_name(f"{host}:{far.getsockname()[1]}"))
    near.listen(256)
    return far, near


class SnapshotCopier:
    """Has another node hold own snapshots for one of its slots, in a thread; reports each.

    `on_copied(step, epoch)` is called for each. All wait for a copy before the next snapshot
    is sealed, so it is tried again, by one of `relays` where the other cannot be heard from here,
    until it arrives, is overwritten, or `close` is called;
    `on_broken(why)` is called where the reason is another one than that of the last try, and
    `on_moving()` every few tenths of a second while bytes of a copy move.
    """

    def __init__(
        self,
        store: SnapshotStore,
        address: str,
        holder: int,
        *,
        secret: Secret,
        relays: Sequence[str] = (),
        on_copied: Callable[[int, int], None],
        on_broken: Callable[[str], None],
        on_moving: Callable[[], None],
    ) -> None:
        self._store = store
        self._address = address
        self._holder = holder
        self._secret = secret
        self._relays = relays
        self._on_copied = on_copied
        self._on_broken = on_broken
        self._on_moving = on_moving
        self._told_s = time.monotonic()
        self._sock: socket.socket | None = None
        self._queue: SimpleQueue[SealedShard | None] = SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="snapshot-copier", daemon=True).start()

    def send(self, record: SealedShard) -> None:
        """Queue a sealed record."""
        self._queue.put(record)

    def close(self) -> None:
        """End after one more try of each copy that is queued."""
        self._closed.set()
        self._queue.put(None)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._deliver(record)
        self._disconnect()

    def _deliver(self, record: SealedShard) -> None:
        """Over a new connection where there is none or where the old one breaks."""
        told = None
        # Where it is overwritten, a newer one is queued behind it.
        while self._store.is_sealed(record):
            is_new = self._sock is None
            try:
                if self._sock is None:
                    self._sock = self._connect()
                self._sock.settimeout(STALL_S)
                if self._copy(self._sock, record):
                    self._on_copied(record.step, record.epoch)
                return
            except (OSError, *_MALFORMED) as error:
                self._disconnect()
                if str(error) != told:
                    told = str(error)
                    self._on_broken(told)
            if is_new and self._closed.wait(COPY_AGAIN_S):
                return

    def _connect(self) -> socket.socket:
        sock = connect_by(self._address, self._relays, secret=self._secret, timeout_s=STALL_S)
        try:
            have_probed(sock)
            prove(sock, self._secret, Kind.SERVER, timeout_s=STALL_S)
        except BaseException:
            sock.close()
            raise
        return sock

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _copy(self, sock: socket.socket, record: SealedShard) -> bool:
        """Send all bytes; False where they were overwritten meanwhile."""
        found = self._store.open(
            owner=record.owner,
            step=record.step,
            epoch=record.epoch,
            notes=record.buffer in NOTES,
        )
        if found is None:
            return False
        fd, length = found
        try:
            send_frame(sock, {"t": "copy", "record": record, "holder": self._holder})
            check = partial(_check_heard, sock)
            moves = self._tell_that_it_moves
            send_memory(sock, fd, BODY_OFFSET, length, on_sent=moves, check=check)
        finally:
            os.close(fd)
        send_frame(sock, {"sealed": self._store.is_sealed(record)})
        return bool(receive_frame(sock, STALL_S, check)["held"])

    def _tell_that_it_moves(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._on_moving()


def _check_heard(sock: socket.socket) -> None:
    """All wait for a copy: where its way has gone, another one is taken."""
    if (silent_s := answers(sock).silent_s) > LIMIT_S:
        raise TimeoutError(f"the other machine has answered nothing for {silent_s:.1f} s")


def send_memory(
    sock: socket.socket,
    fd: int,
    offset: int,
    count: int,
    *,
    on_sent: Callable[[], None] = lambda: None,
    check: Check = lambda: None,
) -> None:
    """Send `count` bytes of the memory from `offset`; raises OSError where the peer stalls.

    `on_sent()` is called after every piece, `check()` in each second in which none goes out.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _LOOK_EVERY_S, 0))
    end, moved_s = offset + count, time.monotonic()
    while offset < end:
        try:
            sent = os.sendfile(sock.fileno(), fd, offset, min(end - offset, _PIECE_BYTES))
        except BlockingIOError as error:
            check()
            if time.monotonic() - moved_s > STALL_S:
                raise TimeoutError(f"the peer took nothing for {STALL_S:g} s") from error
            continue
        if not sent:
            raise ConnectionError(f"snapshot memory ends at byte {offset}, not at {end}")
        offset, moved_s = offset + sent, time.monotonic()
        on_sent()


class Copies:
    """Has other nodes hold what is sealed by the worker of one slot; runs in the control loop.

    Slots of this node hold it as it is: the memory is the guardian's.
    """

    def __init__(self, common: Common, slot: int, *, tell: Callable[[WireMessage], None]) -> None:
        """`tell(message)`, from any thread, is for the trainer."""
        self._common = common
        self._slot = slot
        self._tell = tell
        # By the slot that holds it, with the node that has the slot.
        self._copiers: dict[int, tuple[int, SnapshotCopier]] = {}

    def send(self, record: SealedShard, targets: Collection[int]) -> None:
        """Have these slots hold it, and no others what comes after it."""
        for former in self._copiers.keys() - set(targets):
            self._close(former)
        for target in targets:
            node = self._common.agreement.nodes.of_slots[target]
            if node == self._common.node:
                self._copied(target, record.step, record.epoch)
                continue
            if target in self._copiers and self._copiers[target][0] != node:
                self._close(target)
            if target not in self._copiers:
                self._copiers[target] = node, self._open(target, node)
            self._copiers[target][1].send(record)

    def close(self) -> None:
        """Copy nothing more."""
        for target in list(self._copiers):
            self._close(target)

    def _close(self, target: int) -> None:
        self._copiers.pop(target)[1].close()

    def _open(self, target: int, node: int) -> SnapshotCopier:
        common = self._common
        addresses, own = common.agreement.addresses, common.node
        return SnapshotCopier(
            common.store,
            addresses[node],
            target,
            secret=common.spec.rendezvous.secret,
            relays=[address for other, address in addresses.items() if other not in (own, node)],
            on_copied=partial(self._copied, target),
            on_broken=partial(self._broken, target),
            on_moving=partial(self._moving, target),
        )

    def _copied(self, target: int, step: int, epoch: int) -> None:
        self._tell(Copied(step=step, epoch=epoch, slot=target))

    def _moving(self, target: int) -> None:
        self._tell(Copying(slot=target))

    def _broken(self, target: int, why: str) -> None:
        # The end of the target itself comes over its control link; this is only for the record.
        self._common.events.emit("copy_broken", slot=self._slot, to=target, why=why)
