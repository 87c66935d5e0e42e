"""A node's guardian: what must outlive the node's agent, and the agents, one after the other.

It holds memory by name, starts trainers for the agent and tells it of their ends, and starts the
agent again where that dies or stands still. It takes no part in the job. Standard library only.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from elaswave_plugin.agent.guarded_trainers import Given, GuardedTrainers, Starter
from elaswave_plugin.agent.process_states import ProcessorWaits
from elaswave_plugin.errors import EXIT_FAILED
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.reactor import Reactor

LONGEST_CALL_BYTES = 1 << 18
_AGAIN_S = 0.01
Call = dict[str, Any]
Begin = Callable[[socket.socket, socket.socket, int], int]


class AgentLife:
    """An agent that `begin(calls, notices, number)` has forked.

    `page`: it shows there that it runs; `calls`: the connection on which it asks; `on_end()`: its
    process has ended.
    """

    def __init__(
        self,
        reactor: Reactor,
        begin: Begin,
        number: int,
        page: mmap.mmap,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self.calls, theirs = _pair()
        self._notices, their_notices = _pair()
        self._notices.setblocking(False)
        self._reactor = reactor
        self._page = page
        page[:8] = bytes(8)
        self.pid = begin(theirs, their_notices, number)
        theirs.close()
        their_notices.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._untold: deque[tuple[bytes, list[int]]] = deque()
        self._waits = ProcessorWaits()
        reactor.watch(self._pidfd, on_end)

    def tell(self, notice: Call, fds: Sequence[int]) -> None:
        """Tell it something; where it is dead, the next one asks for what has happened."""
        self._untold.append((json.dumps(notice).encode(), list(fds)))
        self._send()

    def signal(self, number: int) -> None:
        """Signal its process, if that is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def stands_still_s(self) -> float:
        """For how long it has not touched its page, though it could have run."""
        touched_s: float = struct.unpack("q", self._page[:8])[0] / 1e9
        if not touched_s:
            return 0.0
        return time.monotonic() - touched_s - self._waits.since(touched_s, self.pid)

    def forgive(self) -> None:
        """Count from now on: until now it may have done anything."""
        if any(self._page[:8]):
            self._page[:8] = struct.pack("q", time.monotonic_ns())

    def close(self) -> int:
        """Wait for its end, and let go of it; returns its exit code, negative after a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for fd in (self._pidfd, self.calls.fileno()):
            self._reactor.unwatch(fd)
        os.close(self._pidfd)
        self.calls.close()
        self._notices.close()
        self._untold.clear()
        return code

    def _send(self) -> None:
        while self._untold:
            data, fds = self._untold[0]
            try:
                socket.send_fds(self._notices, [data], fds)
            except BlockingIOError:
                self._reactor.after(_AGAIN_S, self._send)
                return
            except OSError:  # it is dead
                return
            self._untold.popleft()


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, LONGEST_CALL_BYTES)
    return pair


EXIT_CRASHED = 70
PAGE, RECORD = "elaswave agent page", "elaswave record"
STANDS_STILL_S = 1.0
"""An agent that has not touched its page for so long, while it could run, is ended."""
_LOOK_EVERY_S = 0.25
# More deaths of agents within these seconds are no accident.
_MOST_DEATHS, _WITHIN_S = 5, 20.0


class Guardian:
    """Serves one agent at a time; `on_end(code)` is called once there is to be none any more.

    `begin_agent(calls, notices, life)`: forks an agent, and returns its process id. `starters`: the
    ways to start trainers, by place; None: by exec.
    """

    def __init__(
        self,
        reactor: Reactor,
        begin_agent: Begin,
        starters: Sequence[Starter | None],
        *,
        on_end: Callable[[int], None],
    ) -> None:
        self._reactor = reactor
        self._begin_agent = begin_agent
        self._trainers = GuardedTrainers(reactor, starters, tell=self.tell)
        self._on_end = on_end
        self._memory: dict[str, int] = {}
        self._life: AgentLife | None = None
        self._lives = 0
        # The one that was ended last, as it stood still.
        self._killed: AgentLife | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._signals: list[Call] = []
        self._page = mmap.mmap(self._memory_named(PAGE, mmap.PAGESIZE), mmap.PAGESIZE)
        self._looked_s = time.monotonic()
        self._over = self._met = False

    def start(self) -> None:
        """Begin the first agent."""
        self._begin_life()
        self._reactor.after(_LOOK_EVERY_S, self._look)

    @property
    def has_met(self) -> bool:
        """True if an agent here has taken part in the job: it has left a record."""
        fd = self._memory.get(RECORD)
        self._met = self._met or (fd is not None and os.fstat(fd).st_size > 0)
        return self._met

    def tell(self, notice: Call, fds: Sequence[int] = ()) -> None:
        """Tell the agent something; where there is none, the next one asks for it."""
        if self._life is not None:
            self._life.tell(notice, fds)

    def start_by(self, starters: Sequence[Starter], pid: int) -> None:
        """Start trainers in other ways from now on, by place: by a child of this process."""
        self._trainers.start_by(starters, pid)

    def send_signal(self, number: int, place: int | None = None) -> None:
        """Hand on a signal: for the trainer of one place, or for all of this node.

        Before there is a job, all ends. The next agent is told of it too.
        """
        notice = {"n": "signal", "number": int(number), "place": place}
        self._signals.append(notice)
        self.tell(notice)
        if self._life is not None and not self.has_met:
            self._life.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the agent and all trainers, at once."""
        self._over = True
        if self._life is not None:
            self._life.signal(signal.SIGKILL)
        self._trainers.kill()

    def close(self) -> None:
        """Give everything back; the reactor has stopped."""
        self.kill()
        self._met = self.has_met
        if self._life is not None:
            self._life.close()
        self._trainers.close()
        self._page.close()
        for fd in self._memory.values():
            os.close(fd)
        self._memory.clear()

    # ---- the agent's lives --------------------------------------------------------------------

    def _begin_life(self) -> None:
        life = self._life = AgentLife(
            self._reactor, self._begin_agent, self._lives, self._page, on_end=self._on_agent_end
        )
        self._lives += 1
        self._reactor.watch(life.calls.fileno(), lambda: self._answer(life.calls))
        for notice in self._signals:
            self.tell(notice)

    def _on_agent_end(self) -> None:
        life, self._life = self._life, None
        assert life is not None
        code = life.close()
        self._deaths.append(time.monotonic())
        lived = code >= 0 and code != EXIT_CRASHED
        if self._over or lived or not self.has_met:
            return self._finish(code)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if len(self._deaths) == _MOST_DEATHS and self._deaths[-1] - self._deaths[0] < _WITHIN_S:
            say(f"the agent (pid {life.pid}) ended: {how}, as {_MOST_DEATHS} have within seconds")
            return self._finish(EXIT_FAILED)
        say(f"the agent (pid {life.pid}) ended: {how}; another one goes on")
        self._begin_life()

    def _finish(self, code: int) -> None:
        self._over = True
        self._trainers.kill()
        self._on_end(code)

    def _look(self) -> None:
        """End an agent that stands still, or loops; not where this process could not run either."""
        now_s, life = time.monotonic(), self._life
        self._trainers.reap(None if life is None else life.pid)
        is_late = now_s - self._looked_s > STANDS_STILL_S
        self._looked_s = now_s
        if life is not None and is_late:
            life.forgive()
        elif life is not None and (still_s := life.stands_still_s()) > STANDS_STILL_S:
            if life is not self._killed:  # on a busy machine it may take a while to end
                say(f"the agent (pid {life.pid}) has stood still for {still_s:.1f} s: ended")
            self._killed = life
            life.signal(signal.SIGKILL)
        self._reactor.after(_LOOK_EVERY_S, self._look)

    # ---- what the agent asks ------------------------------------------------------------------

    def _answer(self, calls: socket.socket) -> None:
        try:
            data = calls.recv(LONGEST_CALL_BYTES)
        except ConnectionError:
            data = b""
        if not data:  # its end comes
            self._reactor.unwatch(calls.fileno())
            return
        call = json.loads(data)
        answer: Call = {}
        fds: list[int] = []
        match call["c"]:
            case "memory":
                fds = [self._memory_named(call["name"], 0)]
            case "drop":
                if (fd := self._memory.pop(call["name"], None)) is not None:
                    os.close(fd)
            case "names":
                answer = {"names": list(self._memory)}
            case "start":
                secret, page, *snapshots = (self._memory_named(one, 0) for one in call["memory"])
                given = Given(call["env"], secret, page, snapshots)
                which = call["place"], call["slot"], call["incarnation"]
                self._trainers.start(*which, call["program"], given)
            case "trainers":
                answer = {"trainers": [one.facts for one in self._trainers.all]}
                fds = [one.pidfd for one in self._trainers.all if one.pidfd >= 0]
            case "seen":
                self._trainers.seen(call["slot"], call["incarnation"])
        with contextlib.suppress(ConnectionError):  # it has died meanwhile
            socket.send_fds(calls, [json.dumps(answer).encode()], fds)

    def _memory_named(self, name: str, size: int) -> int:
        if name not in self._memory:
            self._memory[name] = os.memfd_create(name, os.MFD_CLOEXEC)
            if size:
                os.ftruncate(self._memory[name], size)
        return self._memory[name]
