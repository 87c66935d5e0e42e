"""Jobs of tiny trainers under the real launcher, agents and zygote, and what they report."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from elaswave_plugin.ipc.reactor import is_readable
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.idle import Deadline
from tests.ports import free_port

Report = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).with_name("tiny_trainer.py")
LAUNCH = "import sys; from elaswave_plugin.launch.launch import main; sys.exit(main(sys.argv[1:]))"
WAIT_S = 20.0
START_S = 0.5


def environment(**more: str) -> dict[str, str]:
    """The environment in which the package is found from any directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASWAVE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))
    # As `elaswave run` sets it for several workers; a zygote has to have the same.
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": path, **more}


class Job:
    """A launcher (or several) with `world` tiny trainers; use it in a with statement."""

    def __init__(self, folder: Path, world: int, *options: str, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.world = world
        # A process of them all takes its time to start, on two cores.
        self.wait_s = max(WAIT_S, START_S * world)
        self.run_dir = folder / "run"
        self.reports: list[Report] = []
        self.pids: dict[int, int] = {}
        self.agents: dict[int, int] = {}
        self.launchers: list[subprocess.Popen[str]] = []
        self._watched: dict[int, int] = {}
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._inbox.bind(str(folder / "test"))
        self._options = options
        self._env = environment(TINY_FOLDER=str(folder), **env)

    def launch(
        self, *options: str, command: Sequence[str] = (), within: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start a launcher; its output goes to a file for `output`.

        ``within``: the words that enter a namespace, before its own.
        """
        number = len(self.launchers)
        with open(self.folder / f"output-{number}", "w") as output:
            process = subprocess.Popen(
                command
                or [
                    *within,
                    sys.executable,
                    "-c",
                    LAUNCH,
                    f"--dir={self.run_dir}",
                    *self._options,
                    *options,
                    str(TRAINER),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                text=True,
            )
        self.launchers.append(process)
        return process

    def start(self, *options: str, sealed: bool = True, nodes: int = 1) -> "Job":
        """Launch on so many nodes, until every trainer has joined (and sealed step 0)."""
        if nodes > 1:
            options = (*options, f"--nnodes={nodes}", f"--master-port={free_port()}")
        for node in range(nodes):
            self.launch(f"--nproc-per-node={self.world // nodes}", f"--node-rank={node}", *options)
        return self.joined(sealed=sealed)

    def joined(self, *, sealed: bool = True) -> "Job":
        """Wait until every trainer has joined (and sealed step 0)."""
        for report in self.all("started", range(self.world)):
            self.pids[report["slot"]] = report["pid"]
            self.watch(report["pid"])
        self.all("commit", range(self.world), epoch=1)
        # An agent writes this when it has met the others, and its trainers run before that.
        deadline = Deadline(self.wait_s)
        while len(begun := self.events("worker_started")) < self.world:
            assert deadline.left_s(), f"no events of {self.world} workers: {begun}"
            time.sleep(0.005)  # the file is all that shows it
        for event in begun:
            self.agents[event["slot"]] = event["agent_pid"]
            self.watch(event["agent_pid"])
        if sealed:
            for slot in range(self.world):
                self.tell(slot, "seal 0")
            self.all("copied", range(self.world), step=0)
            # A leader that was lost before the others know this would end the job.
            for slot in range(self.world):
                self.tell(slot, "await_start")
            self.all("job_started", range(self.world))
        return self

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
                process.wait(self.wait_s)
        for pid in self.left(self.wait_s):
            os.kill(pid, signal.SIGKILL)
        for pidfd in self._watched.values():
            os.close(pidfd)
        self._inbox.close()

    # ---- talking to the trainers --------------------------------------------------------------

    def tell(self, slot: int, order: str) -> None:
        """Give a trainer an order."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(order.encode(), str(self.folder / str(slot)))

    def kill(self, *slots: int) -> float:
        """SIGKILL these trainers; the moment, monotonic, just before."""
        at_s = time.monotonic()
        for slot in slots:
            os.kill(self.pids[slot], signal.SIGKILL)
        return at_s

    def kill_agent(self, *slots: int) -> None:
        """SIGKILL the agents that these workers have had at first."""
        for pid in {self.agents[slot] for slot in slots}:
            os.kill(pid, signal.SIGKILL)

    def next_agent(self, node: int, life: int) -> int:
        """The process of an agent of a node, by its number, once it takes part."""
        deadline = Deadline(self.wait_s)
        while True:
            for event in self.events("agent_started"):
                if (event["node"], event["life"]) == (node, life):
                    self.watch(pid := event["pid"])
                    return int(pid)
            assert deadline.left_s(), f"no life {life} of the agent:\n{self.outputs()}"
            time.sleep(0.005)  # the file is all that shows it

    def kill_node(self, *nodes: int) -> None:
        """SIGKILL the guardians of these nodes, with which all of their processes end."""
        for node in nodes:
            self.launchers[node].kill()

    def stop_agent(self, slot: int) -> None:
        """SIGSTOP the agent of a worker and wait until it has stopped.

        Before, a thread of it may go on for a while: the signal waits for the one it was given to.
        """
        process = psutil.Process(self.agents[slot])
        process.suspend()
        deadline = Deadline(self.wait_s)
        while any(
            psutil.Process(one.id).status() != psutil.STATUS_STOPPED for one in process.threads()
        ):
            assert deadline.left_s(), f"the agent of worker {slot} does not stop"
            time.sleep(0.001)  # nothing tells that a process which is no child has stopped

    def one(self, what: str, slot: int, **wanted: object) -> Report:
        """The next matching report of a trainer; each is returned once."""

        def fits(report: Report) -> bool:
            return (
                report["what"] == what
                and report["slot"] == slot
                and all(report[key] == value for key, value in wanted.items())
            )

        return self._next(fits, f"{what} of worker {slot} with {wanted}")

    def all(self, what: str, slots: Sequence[int], **wanted: object) -> list[Report]:
        """The next matching report of each of these trainers."""
        return [self.one(what, slot, **wanted) for slot in slots]

    def _next(self, fits: Callable[[Report], bool], what: str) -> Report:
        deadline = Deadline(self.wait_s)
        while True:
            for report in self.reports:
                if fits(report):
                    self.reports.remove(report)
                    return report
            left_s = deadline.left_s()
            assert left_s, f"no {what}; have {self.reports}; output:\n{self.outputs()}"
            if is_readable(self._inbox, left_s):
                self.reports.append(json.loads(self._inbox.recv(1 << 20)))

    def nothing(self, what: str, slot: int, *, for_s: float) -> bool:
        """Return whether a trainer reports nothing of this kind within that time."""
        deadline_s = time.monotonic() + for_s
        while not any((r["what"], r["slot"]) == (what, slot) for r in self.reports):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not is_readable(self._inbox, left_s):
                return True
            self.reports.append(json.loads(self._inbox.recv(1 << 20)))
        return False

    def listen(self, for_s: float) -> None:
        """Take in what the trainers report meanwhile: with ten reports unheard they wait."""
        deadline_s = time.monotonic() + for_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if is_readable(self._inbox, left_s):
                self.reports.append(json.loads(self._inbox.recv(1 << 20)))

    def finish(self, slots: Sequence[int], *, launcher: int = 0) -> int:
        """Let these trainers finish; the exit code of a launcher."""
        for slot in slots:
            self.tell(slot, "finish")
        return self.code(launcher)

    # ---- what is left -------------------------------------------------------------------------

    def code(self, launcher: int = 0) -> int:
        """The exit code of a launcher, when it has ended."""
        try:
            return self.launchers[launcher].wait(self.wait_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher does not end; output:\n{self.output()}") from None

    def output(self, launcher: int = 0) -> str:
        """Return what a launcher and its processes have printed."""
        return (self.folder / f"output-{launcher}").read_text()

    def said(self, words: str, launcher: int = 0) -> str:
        """The first line with these words of a launcher that still runs.

        Nothing orders what it prints with what a trainer reports, so it is waited for.
        """
        deadline = Deadline(self.wait_s)
        while True:
            for line in self.output(launcher).splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line
            assert deadline.left_s(), f"no {words!r} in:\n{self.output(launcher)}"
            time.sleep(0.01)  # nothing tells that a file has grown

    def outputs(self) -> str:
        """Return what all launchers and their processes have printed."""
        return "".join(self.output(number) for number in range(len(self.launchers)))

    def events(self, kind: str) -> list[Report]:
        """The events of a kind in the run directory."""
        events = read_lines(self.run_dir / EVENTS_FILE)
        return [event for event in events if event["kind"] == kind]

    def watch(self, pid: int) -> None:
        """Keep an eye on a process, for `left`."""
        if pid not in self._watched:
            self._watched[pid] = os.pidfd_open(pid)

    def ended(self, pid: int) -> bool:
        """Return whether a watched process ends in time."""
        return is_readable(self._watched[pid], self.wait_s)

    def left(self, timeout_s: float) -> list[int]:
        """List the watched processes that still live after at most this time."""
        deadline_s = time.monotonic() + timeout_s
        living = []
        for pid, pidfd in self._watched.items():
            left_s = max(0.0, deadline_s - time.monotonic())
            if not is_readable(pidfd, left_s):
                living.append(pid)
        return living
