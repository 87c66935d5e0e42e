"""A trainer's end of the link to its agent: whichever thread waits for a frame receives it.

The agent may die, and another one be there in a moment: the link is opened again, and what was said
is said again, the last word of each kind. The agent tells what counts of its side.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from elaswave_plugin.core.agreement.messages import Begun, Detached
from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.environment import AGENT, INCARNATION, JOB_SECRET_FD, SLOT
from elaswave_plugin.ipc.frames import SAY, TRAINER, Progress, SetConstants
from elaswave_plugin.ipc.peer import near_name
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.wire import FrameBuffer, encode, receive_frame, send_frame

_READ_BYTES = 1 << 16
# Long after the others have given up one that does not run.
_SEND_WITHIN_S = 300.0
_TIMEVAL = struct.Struct("ll")
_ANSWER_S = 10.0
# Of an agent's guardian, which starts another agent within a fraction of it.
_OPEN_WITHIN_S = 60.0
_AGAIN_S = 0.02
# What means nothing any more once the link has broken, or is asked for again.
_SAID_ONCE = (Begun, Progress)
Dial = Callable[[int], socket.socket]


def dial_agent(
    address: str, secret: Secret, slot: int, incarnation: int, epoch: int
) -> socket.socket:
    """Open the control link of a trainer; `epoch`: of the newest view that it was told.

    By a Unix socket, beside the agent's `address`. Raises OSError.
    """
    sock = _connect(address, secret)
    try:
        send_frame(sock, {"t": TRAINER, "slot": slot, "incarnation": incarnation, "epoch": epoch})
    except BaseException:
        sock.close()
        raise
    return sock


def say_once(
    address: str, secret: Secret, slot: int, incarnation: int, message: WireMessage
) -> bool:
    """Say something beside the control link; returns whether the agent has heard it."""
    deadline_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline_s:
        try:
            with _connect(address, secret) as sock:
                worker = {"slot": slot, "incarnation": incarnation}
                send_frame(sock, {"t": SAY, **worker, "frame": message})
                return "error" not in receive_frame(sock, _ANSWER_S)
        except ConnectionRefusedError:
            return False
        except OSError:
            time.sleep(_AGAIN_S)  # the agent's next life is about to be there
    return False


def _connect(address: str, secret: Secret) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_ANSWER_S)
        sock.connect(near_name(address))
        prove(sock, secret, Kind.SERVER, timeout_s=_ANSWER_S)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class ControlLink:
    """Frames both ways; a thread of its own, the doorbell, listens while no other receives.

    Frames are taken in one after the other, by `on_frame` in the thread that received them.
    `on_end(why)`: nothing comes any more. `dial(epoch)`: opens the link, with the newest view that
    was told, as `epoch()` has it.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        slot: int,
        epoch: Callable[[], int],
        on_frame: Callable[[dict], None],  # type: ignore[type-arg]
        on_end: Callable[[str], None],
        send_within_s: float = _SEND_WITHIN_S,
    ) -> None:
        self._dial = dial
        self._epoch = epoch
        self._send_within_s = send_within_s
        self._slot = slot
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = FrameBuffer()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._said: dict[object, WireMessage] = {}
        self._waiter_receives = False
        self._is_down = False
        self.closed = False
        self._sock = self._open()
        self._bell = select.epoll()
        self._bell.register(self._sock, select.EPOLLIN)

    def listen(
        self, *, silence_s: Callable[[], float | None], on_silence: Callable[[], None]
    ) -> None:
        """Start the doorbell; it calls `on_silence` whenever it hears nothing for `silence_s()`."""

        def run() -> None:
            try:
                self._listen_until_the_end(silence_s, on_silence)
            except Exception as error:
                self._on_end(f"its doorbell failed: {error!r}")
                traceback.print_exc()

        threading.Thread(target=run, name="elaswave-doorbell", daemon=True).start()

    def send(self, message: WireMessage) -> None:
        """Send from any thread; raises JobStopped where no agent is there, or reads nothing."""
        with self._sending:
            if self.closed:
                raise JobStopped(f"the agent of worker {self._slot} is gone")
            if not isinstance(message, _SAID_ONCE):
                # Constants are said in parts.
                key = tuple(message.what) if isinstance(message, SetConstants) else type(message)
                self._said.pop(key, None)
                self._said[key] = message
            if self._is_down:
                return  # it is said with the others once the link is there again
            try:
                self._sock.sendall(encode(message))
            except BlockingIOError as error:
                raise JobStopped(
                    f"the agent of worker {self._slot} has read nothing for"
                    f" {self._send_within_s:g} s: is it stopped?"
                ) from error
            except OSError:
                self._is_down = True  # the thread that receives opens it again

    @contextlib.contextmanager
    def receiving_here(self) -> Iterator[None]:
        """The calling thread receives: it waits for a frame, and to wake two threads takes time."""
        with self._receiving:
            here = not self.closed
            if here:
                self._waiter_receives = True
                self._bell.unregister(self._sock)
        try:
            yield
        finally:
            with self._receiving:
                self._waiter_receives = False
                if here and not self.closed:
                    self._bell.register(self._sock, select.EPOLLIN)

    def receive(self, timeout_s: float) -> bool:
        """Take in what comes next, `receiving_here`; False where nothing did within `timeout_s`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if timeout_s <= 0 or not poll.poll(1000 * timeout_s):
            return False
        self._take_in()
        return True

    def _listen_until_the_end(
        self, silence_s: Callable[[], float | None], on_silence: Callable[[], None]
    ) -> None:
        while not self.closed:
            if not self._bell.poll(silence_s()):
                on_silence()
                continue
            with self._receiving:
                if self._waiter_receives:
                    continue
                before = self._sock
                if self._take_in() and self._sock is not before:
                    self._bell.register(self._sock, select.EPOLLIN)

    def _take_in(self) -> bool:
        """Take in what has come; False where no agent is there any more."""
        try:
            # A waiting thread may have taken in meanwhile what woke this one.
            data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return self._open_again()
        for frame in self._buffer.feed(data):
            self._on_frame(frame)
        return True

    # ---- the link itself ----------------------------------------------------------------------

    def _open(self) -> socket.socket:
        """Dial until an agent answers; raises OSError where there is no guardian any more."""
        deadline_s = time.monotonic() + _OPEN_WITHIN_S
        while True:
            try:
                sock = self._dial(self._epoch())
                break
            except ConnectionRefusedError:
                raise
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_AGAIN_S)  # the next agent is about to be there
        # The kernel's own limit, since others receive from this socket meanwhile.
        within = _TIMEVAL.pack(int(self._send_within_s), int(self._send_within_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, within)
        return sock

    def _open_again(self) -> bool:
        """Open the link in the place of one that broke, and say everything again."""
        with self._sending:
            self._is_down = True
            self._sock.close()
        self._buffer = FrameBuffer()
        try:
            sock = self._open()
        except OSError as error:
            self.closed = True
            self._on_end(f"the agent of this worker's node is gone: {error}")
            return False
        with self._sending:
            self._sock = sock
            self._is_down = False
            try:
                for message in self._said.values():
                    sock.sendall(encode(message))
            except OSError:
                self._is_down = True  # its end is read next
        return True


_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class AgentContact:
    """The address of the agent, the job's secret, and the worker that this process is.

    No variable of the environment has the secret: what a trainer starts would inherit it.
    """

    address: str
    secret: Secret
    slot: int
    incarnation: int
    pid: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "AgentContact":
        """Read what the guardian has given; raises OSError, KeyError where this is no trainer."""
        return cls(
            address=env[AGENT],
            secret=Secret(os.pread(int(env[JOB_SECRET_FD]), _MOST_BYTES, 0)),
            slot=int(env[SLOT]),
            incarnation=int(env[INCARNATION]),
            pid=os.getpid(),
        )

    @property
    def dial(self) -> Dial:
        """The call that opens the control link."""
        return partial(dial_agent, self.address, self.secret, self.slot, self.incarnation)

    def say(self, message: WireMessage) -> bool:
        """Say something beside the control link; returns whether the agent has heard it.

        It hears nothing from a child of the trainer.
        """
        if os.getpid() != self.pid:
            return False
        return say_once(self.address, self.secret, self.slot, self.incarnation, message)

    def say_detached(self, *, trains: bool, missing: str) -> bool:
        """Say that the trainer works, or has ended, without having joined the job."""
        return self.say(Detached(slot=self.slot, trains=trains, missing=missing))
