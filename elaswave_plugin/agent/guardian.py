"""A node's guardian: what must outlive the node's agent, and the agents, one after the other.

It holds memory by name, starts trainers for the agent and tells it of their ends, and starts the
agent again where that dies or stands still. It takes no part in the job. Standard library only.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.agent.process_states import ProcessorWaits
from elaswave_plugin.agent.starters import ExecStarter, Given, Starter
from elaswave_plugin.errors import EXIT_FAILED
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.process_tree import Orphans, own_children
from elaswave_plugin.ipc.reactor import Reactor

EXIT_CRASHED = 70
PAGE, RECORD = "elaswave agent page", "elaswave record"
STANDS_STILL_S = 1.0
"""An agent that has not touched its page for so long, while it could run, is ended."""
_LOOK_EVERY_S = 0.25
# The number of agents that may die within this time; then it is no accident any more.
_MOST_DEATHS, _WITHIN_S = 5, 20.0
_GRACE_S = 2.0
LONGEST_CALL_BYTES = 1 << 18
Call = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """A trainer that was started: by which way, of which slot, and how it has ended."""

    place: int
    slot: int
    incarnation: int
    tell: Callable[[Call, Sequence[int]], None]
    orphans: Orphans
    pid: int = 0
    pidfd: int = -1
    end: dict[str, Any] | None = None

    @property
    def facts(self) -> Call:
        """The facts that an agent is told of it."""
        one = {"place": self.place, "slot": self.slot, "incarnation": self.incarnation}
        return {**one, "pid": self.pid, "end": self.end}

    def started(self, pid: int, pidfd: int) -> None:
        """It runs."""
        self.pid, self.pidfd = pid, pidfd
        self.tell({"n": "started", **self.facts}, [pidfd])

    def ended(self, status: int | None, why: str, exit_code: int | None) -> None:
        """It has ended; what it has started ends before anybody is told, and begins again."""
        self.end = {"status": status, "why": why, "exit_code": exit_code}
        is_done = status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        (self.orphans.end if is_done else self.orphans.end_now)(self.pid)
        self.tell({"n": "ended", **self.facts}, [])

    def kill(self) -> None:
        """End it."""
        if self.pidfd >= 0 and self.end is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(slots=True)
class _Life:
    """One agent: its process, and the two connections with it."""

    pid: int
    pidfd: int
    calls: socket.socket
    notices: socket.socket
    untold: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)


class Guardian:
    """Serves one agent at a time; `on_end(code)` is called once there is to be none any more.

    `begin_agent(calls, notices, life)`: forks an agent, and returns its process id. `starters`: the
    ways to start trainers, by place; None: by exec.
    """

    def __init__(
        self,
        reactor: Reactor,
        begin_agent: Callable[[socket.socket, socket.socket, int], int],
        starters: Sequence[Starter | None],
        *,
        on_end: Callable[[int], None],
    ) -> None:
        self._reactor = reactor
        self._begin_agent = begin_agent
        self._starters = list(starters)
        self._exec = ExecStarter(reactor)
        self._on_end = on_end
        self._memory: dict[str, int] = {}
        self._trainers: dict[tuple[int, int], Trainer] = {}
        self._orphans = Orphans(reactor, grace_s=_GRACE_S)
        self._life: _Life | None = None
        self._lives = 0
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._signals: list[Call] = []
        self._page = mmap.mmap(self._memory_named(PAGE, mmap.PAGESIZE), mmap.PAGESIZE)
        self._looked_s = time.monotonic()
        self._over = self._met = False
        # The others that it gets are what its trainers leave behind.
        self._not_mine = own_children()

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
        """Tell the agent something; where it is dead, the next one asks for what has happened."""
        life = self._life
        if life is None:
            return
        life.untold.append((json.dumps(notice).encode(), list(fds)))
        self._send_notices(life)

    def send_signal(self, number: int, place: int | None = None) -> None:
        """Hand on a signal: for the trainer of one place, or for all of this node.

        Before there is a job, all ends. The next agent is told of it too.
        """
        notice = {"n": "signal", "number": int(number), "place": place}
        self._signals.append(notice)
        self.tell(notice)
        if self._life is not None and not self.has_met:
            signal.pidfd_send_signal(self._life.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End the agent and all trainers, at once."""
        self._over = True
        if self._life is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._life.pidfd, signal.SIGKILL)
        for trainer in self._trainers.values():
            trainer.kill()

    def close(self) -> None:
        """Give everything back; the reactor has stopped."""
        self.kill()
        self._met = self.has_met
        if self._life is not None:
            os.waitpid(self._life.pid, 0)
            self._forget_life(self._life)
        self._orphans.finish()
        for trainer in self._trainers.values():
            trainer.close()
        for starter in self._starters:
            if starter is not None:
                starter.close()
        self._page.close()
        for fd in self._memory.values():
            os.close(fd)
        self._memory.clear()

    # ---- the agent's lives --------------------------------------------------------------------

    def _begin_life(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        our_notices, their_notices = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs, our_notices, their_notices):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, LONGEST_CALL_BYTES)
        our_notices.setblocking(False)
        self._page[:8] = bytes(8)
        pid = self._begin_agent(theirs, their_notices, self._lives)
        theirs.close()
        their_notices.close()
        self._lives += 1
        life = self._life = _Life(pid, os.pidfd_open(pid), ours, our_notices)
        self._reactor.watch(life.pidfd, self._on_agent_end)
        self._reactor.watch(ours.fileno(), lambda: self._answer(life))
        for notice in self._signals:
            self.tell(notice)

    def _on_agent_end(self) -> None:
        life = self._life
        assert life is not None
        code = os.waitstatus_to_exitcode(os.waitpid(life.pid, 0)[1])
        self._forget_life(life)
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
        for trainer in self._trainers.values():
            trainer.kill()
        self._on_end(code)

    def _forget_life(self, life: _Life) -> None:
        self._life = None
        for fd in (life.pidfd, life.calls.fileno(), life.notices.fileno()):
            self._reactor.unwatch(fd)
        os.close(life.pidfd)
        life.calls.close()
        life.notices.close()

    def _look(self) -> None:
        """End an agent that stands still, or loops; not where this process could not run either."""
        self._reap_orphans()
        now_s, life = time.monotonic(), self._life
        is_late = now_s - self._looked_s > STANDS_STILL_S
        self._looked_s = now_s
        (touched_ns,) = struct.unpack("q", self._page[:8])
        if life is not None and touched_ns and not is_late:
            still_s = now_s - touched_ns / 1e9
            still_s -= life.waits.since(touched_ns / 1e9, life.pid)
            if still_s > STANDS_STILL_S:
                say(f"the agent (pid {life.pid}) has stood still for {still_s:.1f} s: ended")
                signal.pidfd_send_signal(life.pidfd, signal.SIGKILL)
        elif is_late:  # what it did meanwhile is not known
            self._page[:8] = struct.pack("q", time.monotonic_ns() if touched_ns else 0)
        self._reactor.after(_LOOK_EVERY_S, self._look)

    def _reap_orphans(self) -> None:
        """Take note of the ends of processes that trainers have left behind."""
        mine = {trainer.pid for trainer in self._trainers.values()}
        mine |= self._not_mine | ({self._life.pid} if self._life is not None else set())
        for pid in own_children() - mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    # ---- what the agent asks ------------------------------------------------------------------

    def _answer(self, life: _Life) -> None:
        try:
            data = life.calls.recv(LONGEST_CALL_BYTES)
        except ConnectionError:
            data = b""
        if not data:  # its end comes
            self._reactor.unwatch(life.calls.fileno())
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
                self._start(call)
            case "trainers":
                # Those too that something is still to fork.
                answer = {"trainers": [one.facts for one in self._trainers.values()]}
                fds = [one.pidfd for one in self._trainers.values() if one.pidfd >= 0]
            case "seen":
                trainer = self._trainers.pop((call["slot"], call["incarnation"]), None)
                if trainer is not None:
                    trainer.close()
        with contextlib.suppress(ConnectionError):  # it has died meanwhile
            socket.send_fds(life.calls, [json.dumps(answer).encode()], fds)

    def _memory_named(self, name: str, size: int) -> int:
        if name not in self._memory:
            self._memory[name] = os.memfd_create(name, os.MFD_CLOEXEC)
            if size:
                os.ftruncate(self._memory[name], size)
        return self._memory[name]

    def _start(self, call: Call) -> None:
        place, slot, incarnation = call["place"], call["slot"], call["incarnation"]
        secret, page, *snapshots = (self._memory_named(name, 0) for name in call["memory"])
        given = Given(env=call["env"], secret_fd=secret, progress_fd=page, snapshot_fds=snapshots)
        trainer = Trainer(
            place=place,
            slot=slot,
            incarnation=incarnation,
            tell=self.tell,
            orphans=self._orphans,
        )
        self._trainers[slot, incarnation] = trainer
        program = Program(**{**call["program"], "args": tuple(call["program"]["args"])})
        starter = self._starters[place] if place < len(self._starters) else None
        if starter is not None:
            # What should fork it may be gone: by exec it is slower, and that is all.
            with contextlib.suppress(OSError):
                starter.start(program, given, trainer)
                return
        self._exec.start(program, given, trainer)

    def _send_notices(self, life: _Life) -> None:
        while life.untold:
            data, fds = life.untold[0]
            try:
                socket.send_fds(life.notices, [data], fds)
            except BlockingIOError:
                self._reactor.after(0.01, lambda: self._send_notices(life))
                return
            except OSError:  # it is dead: the next one asks
                return
            life.untold.popleft()
