"""Strikes a job from inside of its workers, by a list of drawn events; each happens once.

Every worker runs this. Who is struck follows from the view, and a file in the run directory says
that an event has happened: its steps are done again in a recovery, and then it must not.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.phases import Phases, strike
from elaswave_plugin.recovery.state_keeper import StateKeeper
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.events import read_lines

Record = dict[str, Any]
WAIT_S = 60.0
# So long a step is held for one who joins: changes of the view, and who leaves, await its end.
LET_IN_S = 1.0
_JOINER = "a joiner"
DEADLY = ("kill", "node", "stop", "loop", "gil")
# What a worker does that goes on itself.
HARMLESS = ("agent", "sever", "slow", "zygote")
SLOW_STEPS, SLOW_S = 8, 0.01


def _is_zygote(process: psutil.Process) -> bool:
    """Tell by its title, or by its command before it has one."""
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return words.startswith("elaswave zygote") or "trainer.zygote import" in words
    return False


class Striker:
    """The events of a job, and the worker in whose process this is."""

    def __init__(self, events: list[Record], *, standbys: int, joiners: int, per_node: int) -> None:
        """``standbys``: idle places, one a node; ``joiners``: so many come where it grows."""
        self._events = events
        self._standbys, self._joiners, self._per_node = standbys, joiners, per_node
        self._worker: Worker | None = None
        self._slow_until = 0

    def arm(self) -> None:
        """Look at every announced phase, every step that begins, every wait for a copy."""
        init, fire = Worker.__init__, Phases.fire
        begin, await_copies = GuardedSteps.begin, StateKeeper.await_copies

        def remember(worker: Worker, **options: Any) -> None:
            self._worker = worker
            init(worker, **options)

        def fire_and_strike(phases: Phases, phase: str) -> None:
            self._strike(phase)
            fire(phases, phase)

        def begin_and_hold(steps: GuardedSteps) -> None:
            begin(steps)
            self._hold()

        def wait_and_flip(state: StateKeeper) -> None:
            await_copies(state)
            for event in self._due(("flip",)):
                if self._is_picked(event) and self._claim(event):
                    state.pool._maps[self.worker.completed % 2][BODY_OFFSET + 1000] ^= 1

        layers = sys.modules.get("megatron.core.transformer.transformer_layer")
        if layers is not None:  # where a slow layer is what is measured
            forward = layers.TransformerLayer.forward

            def dawdle(*args: Any, **options: Any) -> Any:
                self._dawdle()
                return forward(*args, **options)

            layers.TransformerLayer.forward = dawdle
        Worker.__init__, Phases.fire = remember, fire_and_strike  # type: ignore[method-assign]
        GuardedSteps.begin, StateKeeper.await_copies = begin_and_hold, wait_and_flip  # type: ignore[method-assign]

    # ---- which events, and whom they strike ---------------------------------------------------

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def _folder(self) -> Path:
        directory = self.worker.config.dir
        assert directory is not None
        return directory

    def _mark(self, event: Record, word: str = "happened") -> Path:
        return self._folder / f"{word}-{event['number']}"

    def _due(self, kinds: tuple[str, ...]) -> Iterator[Record]:
        """Those that may happen now; what follows on another one, as soon as that happened."""
        for event in self._events:
            if event["kind"] not in kinds or self._mark(event).exists():
                continue
            parent = event["after"]
            if parent is not None and not (self._folder / f"happened-{parent}").exists():
                continue
            if parent is not None or self.worker.phases.step >= event["step"]:
                yield event

    def _is_picked(self, event: Record) -> bool:
        """In its own step, one of the view; later, or in a recovery, whoever comes first."""
        slots = sorted(self.worker.view.ranks)
        if event["on_entry"]:
            return True
        if self.worker.phases.step > event["step"] or event["phase"] in RECOVERY_PHASES:
            return True
        return slots[event["pick"] % len(slots)] == self.worker.slot

    def _claim(self, event: Record) -> bool:
        """Return whether the event is this worker's; says so, and in which process."""
        try:
            self._mark(event).touch(exist_ok=False)
        except FileExistsError:
            return False
        worker = self.worker
        worker.events.emit(
            "fault_fired",
            number=event["number"],
            how=event["kind"],
            slot=worker.slot,
            incarnation=worker.member.incarnation,
            step=worker.phases.step,
            phase=event["phase"],
            pid=os.getpid(),
            at_s=time.time(),
            width=len(worker.view.ranks),
            **worker.phases.written(),
        )
        return True

    # ---- what happens -------------------------------------------------------------------------

    def _strike(self, phase: str) -> None:
        if not hasattr(self._worker, "phases"):
            return
        if phase == "forward":
            self._dawdle()
        enters = self.worker.detached or self.worker._entering
        for event in self._due((*DEADLY, *HARMLESS, "ruin")):
            if event["phase"] != phase or event["on_entry"] != enters:
                continue
            if not self._is_picked(event):
                continue
            if event["kind"] == "sever":
                self._sever(event)
            elif self._claim(event):
                self._end(event["kind"])

    def _dawdle(self) -> None:
        if self.worker.phases.step < self._slow_until:
            time.sleep(SLOW_S)

    def _end(self, how: str) -> None:
        if how == "slow":
            self._slow_until = self.worker.phases.step + SLOW_STEPS
        elif how == "ruin":
            own = self._node()
            for node, pid in self._guardians().items():
                # One whose workers are lost holds copies all the same.
                if node != own:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        elif how == "node":
            os.kill(self._guardians()[self._node()], signal.SIGKILL)
            signal.pause()
        elif how == "agent":
            own = self._node()
            agents = [e for e in self._log() if e["kind"] == "agent_started" and e["node"] == own]
            os.kill(agents[-1]["pid"], signal.SIGKILL)
        elif how == "zygote":
            # Of the launch: nodes that came later have none.
            guardian = psutil.Process(self._guardians()[0])
            # What it has just forked is younger, and has its title for a moment.
            found = filter(_is_zygote, guardian.children())
            min(found, key=psutil.Process.create_time).kill()
        else:
            strike(how)

    def _node(self) -> int:
        """The node of the own worker."""
        pid = os.getpid()
        started = [e for e in self._log() if e["kind"] == "worker_started" and e["pid"] == pid]
        node: int = started[-1]["node"]
        return node

    def _guardians(self) -> dict[int, int]:
        """Process ids by node, of those that came later too."""
        begun = [e for e in self._log() if e["kind"] == "agent_started"]
        return {e["node"]: e["guardian_pid"] for e in begun}

    def _log(self) -> list[Record]:
        return read_lines(self.worker.events.path)

    def _sever(self, event: Record) -> None:
        """Break the first link that both ends still hold open; without one, later."""
        for _, link in sorted(self.worker.links.connections.links.items()):
            if link.state.value == "open" and self._claim(event):
                # A socket that its other end has just closed cannot be shut down, nor need be.
                with contextlib.suppress(OSError):
                    link.sock.shutdown(socket.SHUT_RDWR)
                return

    def _hold(self) -> None:
        """Stay in this step until everyone is back, or until the tester has done its part."""
        for event in self._events:
            if event["kind"] not in ("whole", "drain", "grow", "join"):
                continue
            if self.worker.completed < event["step"] or self._mark(event, "done").exists():
                continue
            if event["kind"] == "whole" or self._is_picked(event):
                self._claim(event)
            self._wait_until_done(event)

    def _wait_until_done(self, event: Record) -> None:
        let_in_s, deadline_s = time.monotonic() + LET_IN_S, time.monotonic() + WAIT_S
        self.worker.member.announce("a slow batch")
        try:
            while not self._mark(event, "done").exists():
                self.worker.member.check()
                if event["kind"] == "whole":
                    awaited = self._awaited()
                    if not awaited:
                        self._mark(event, "done").touch()
                    elif {*awaited} == {_JOINER} and time.monotonic() > let_in_s:
                        return  # it may wait for this step's end; the next step holds again
                assert time.monotonic() < deadline_s, f"{event} took too long: {self._awaited()}"
                time.sleep(0.01)  # the files are all that the workers share
        finally:
            self.worker.member.announce(None)

    def _awaited(self) -> list[str]:
        """List the workers that may still come back, and have neither done so nor asked for it."""
        awaited: dict[int, str] = {}
        leaving: set[int] = set()
        standbys, joiners = self._standbys, 0
        for event in self._log():
            match event["kind"]:
                case "fault_fired" if event.get("how") == "node":
                    awaited.pop(event["slot"], None)
                    standbys -= standbys > 0  # the one of that node
                    came = min(standbys, self._per_node)
                    joiners, standbys = joiners + came, standbys - came
                case "fault_fired" if event.get("how") in ("grow", "join"):
                    joiners += self._joiners if event["how"] == "grow" else 1
                case "fault_fired" if event.get("how") == "drain":
                    leaving.add(event["slot"])
                case "node_admitted":
                    joiners -= len(event["slots"])
                    leaving -= {*event["slots"]}
                case "worker_exited" if "SIGKILL" in event["status"]:
                    if event["slot"] not in leaving:  # it does not come back of itself
                        awaited[event["slot"]] = "lost"
                case "worker_started" if event["incarnation"]:
                    awaited[event["slot"]] = "starts"
                case "worker_ready" | "respawn_given_up":
                    awaited.pop(event["slot"], None)
        return [f"{slot} {how}" for slot, how in awaited.items()] + [_JOINER] * max(0, joiners)
