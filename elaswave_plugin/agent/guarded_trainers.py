"""The trainers that a node's guardian has started, and what they leave behind when they end.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.agent.starters import ExecStarter, Given, Starter
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.process_tree import Orphans, own_children
from elaswave_plugin.ipc.reactor import Reactor

_GRACE_S = 2.0
Call = dict[str, Any]
Tell = Callable[[Call, Sequence[int]], None]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """A trainer that was started: in which place, of which slot, and how it has ended."""

    place: int
    slot: int
    incarnation: int
    tell: Tell
    orphans: Orphans
    pid: int = 0
    pidfd: int = -1
    end: dict[str, Any] | None = None

    @property
    def facts(self) -> Call:
        """The facts that an agent is told."""
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


class GuardedTrainers:
    """All trainers of a node; `starters`: the ways to start one, by place; None: by exec.

    `tell(notice, descriptors)`: what becomes of each.
    """

    def __init__(self, reactor: Reactor, starters: Sequence[Starter | None], *, tell: Tell) -> None:
        self._starters: list[Starter | None] = list(starters)
        self._exec = ExecStarter(reactor)
        self._tell = tell
        self._orphans = Orphans(reactor, grace_s=_GRACE_S)
        self._known: dict[tuple[int, int], Trainer] = {}
        # The other children that this process gets are what its trainers leave behind.
        self._not_orphans = own_children()

    @property
    def all(self) -> list[Trainer]:
        """Those of which an agent may not know how they have ended; some may still be forked."""
        return list(self._known.values())

    def start_by(self, starters: Sequence[Starter], pid: int) -> None:
        """Start others in these ways, by place: by a child of this process, which is no orphan.

        The ways before end by themselves: what they were asked for may be about to come.
        """
        self._not_orphans.add(pid)
        self._starters = list(starters)

    def start(self, place: int, slot: int, incarnation: int, program: Call, given: Given) -> None:
        """Start one."""
        trainer = self._known[slot, incarnation] = Trainer(
            place=place,
            slot=slot,
            incarnation=incarnation,
            tell=self._tell,
            orphans=self._orphans,
        )
        what = Program(**{**program, "args": tuple(program["args"])})
        starter = self._starters[place] if place < len(self._starters) else None
        if starter is not None:
            # What should fork it may be gone: by exec it is slower, and that is all.
            with contextlib.suppress(OSError):
                starter.start(what, given, trainer)
                return
        self._exec.start(what, given, trainer)

    def seen(self, slot: int, incarnation: int) -> None:
        """An agent knows how it has ended."""
        trainer = self._known.pop((slot, incarnation), None)
        if trainer is not None:
            trainer.close()

    def reap(self, agent_pid: int | None) -> None:
        """Take note of the ends of processes that trainers have left behind."""
        mine = {trainer.pid for trainer in self.all} | self._not_orphans | {agent_pid}
        for pid in own_children() - mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill(self) -> None:
        """End all, at once."""
        for trainer in self.all:
            trainer.kill()

    def close(self) -> None:
        """Wait for what they have left behind, and let go of everything."""
        self._orphans.finish()
        for trainer in self.all:
            trainer.close()
        for starter in self._starters:
            if starter is not None:
                starter.close()
