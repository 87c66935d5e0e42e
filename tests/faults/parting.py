"""Jobs of which two nodes are parted at a moment of a step, and how long the others stand still."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elaswave_plugin.observer.observer import audit_samples, disagreeing_steps
from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, EventLog, read_lines
from tests.agent.jobs import environment
from tests.faults.harness import JobSpec, Outcome, left_alive, pids_of, sabotage_of
from tests.faults.network import Network, network_of
from tests.faults.networked import LIMIT_S, Seen, end, launched
from tests.idle import Deadline

START_S = 120.0
# The others work again; about 5 s is the aim.
WITHIN_S = 10.0

# In a worker of the pair, so that the moment is certain.
PART = """
import os, subprocess
from elaswave_plugin.recovery.phases import Phases
fire, parted = Phases.fire, []
def part(self, phase):
    came = int(os.environ["ELASWAVE_INCARNATION"])
    is_here = (self._slot, phase, came) == {moment} and self.step >= {step}
    if is_here and not parted:
        parted.append(True)
        for command in {commands}:
            subprocess.run(command, check=True, timeout=10)
        self._events.emit("parted", slot=self._slot, step=self.step, phase=phase)
    fire(self, phase)
Phases.fire = part
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Two nodes that are parted when the first worker of the first one enters a phase."""

    pair: tuple[int, int]
    phase: str
    # The first step in which it does.
    step: int = 3
    # Only what the first sends to the second is lost.
    one_way: bool = False
    # The worker that took that one's place.
    incarnation: int = 0
    # The job goes on until the lost worker is back.
    heals_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """Network namespaces, each with a zygote for the trainers of its node."""

    network: Network
    zygotes: tuple[Path, ...]


@contextmanager
def warm_nodes(number: int, preload: tuple[str, ...], folder: Path) -> Iterator[Nodes]:
    """Make the namespaces, and start the zygotes, for which one process imports, for many jobs."""
    with network_of(number) as network, ExitStack() as stack:
        sockets = tuple(folder / f"zygote-{node}.sock" for node in range(number))
        places = [f"{network.holder(node)}={socket}" for node, socket in enumerate(sockets)]
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.node_zygotes"]
        process = subprocess.Popen([*command, ",".join(preload), *places], env=environment())
        stack.callback(process.wait, START_S)
        stack.callback(process.terminate)
        deadline = Deadline(START_S)
        while not all(socket.exists() for socket in sockets):
            assert process.poll() is None, "a zygote did not start"
            assert deadline.left_s(), "the zygotes did not start in time"
            time.sleep(0.05)
        yield Nodes(network, sockets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """The end of a job: the cut (None: it never came), and the time that the others lost."""

    run: Outcome
    cut: dict[str, Any] | None

    @property
    def ranks(self) -> list[list[int]]:
        """The members of each view."""
        return [event["ranks"] for event in self.run.events("view_committed")]

    @property
    def lost(self) -> set[int]:
        """Workers that some view after the first is without."""
        return {slot for ranks in self.ranks for slot in {*self.ranks[0]} - {*ranks}}

    @property
    def pause_s(self) -> float:
        """The longest time between two steps of a worker that stayed."""
        stayed = min({*self.ranks[0]} - self.lost)
        steps = list(read_lines(self.run.directory / STEPS_FILE))
        times = [float(one["time_s"]) for one in steps if one["slot"] == stayed]
        return max(after - before for before, after in pairwise(times))


def run_parted(spec: JobSpec, cut: Cut, nodes: Nodes, *, data: Path, directory: Path) -> Parted:
    """Run a job to its end; the pair is whole again afterwards."""
    workers = spec.nproc // spec.nodes
    moment = cut.pair[0] * workers, cut.phase, cut.incarnation
    commands = nodes.network.parting(*cut.pair, one_way=cut.one_way)
    sabotage = PART.format(moment=moment, step=cut.step, commands=commands) + sabotage_of(spec)
    arguments = spec.arguments(data, directory)
    with ExitStack() as stack:
        stack.callback(nodes.network.heal, *cut.pair)
        launchers = []
        for node in range(spec.nodes):
            options = (f"--zygote={nodes.zygotes[node]}", *spec.launcher)
            launchers.append(
                launched(
                    nodes.network, node, spec, arguments, directory, *options, sabotage=sabotage
                )
            )
            stack.callback(end, launchers[-1])
        if cut.heals_after_s is not None:
            seen = Seen(directory)
            seen.wait_for("parted")
            time.sleep(cut.heals_after_s)  # the length of the cut
            nodes.network.heal(*cut.pair)
            with EventLog(str(directory / EVENTS_FILE)) as events:
                events.emit("healed")
        limit_s = LIMIT_S + (cut.heals_after_s or 0.0)
        codes = [launcher.wait(limit_s) for launcher in launchers]
    output = (directory / "output").read_text()
    # The leader's node may be the one that is lost: its launcher is then not the one that tells.
    code = 0 if 0 in codes else next(code for code in codes if code)
    orphans = left_alive(pids_of(directory), limit_s=0.0)
    run = Outcome(
        spec=spec, directory=directory, returncode=code, output=output, seconds=0, orphans=orphans
    )
    return Parted(run=run, cut=next(iter(run.events("parted")), None))


def check_parted(parted: Parted, cut: Cut, *, killed: tuple[int, ...] = ()) -> None:
    """Check what a cut promises in any mode; ``killed``: workers that were lost before it."""
    run = parted.run
    assert parted.cut is not None, "the cut never came"
    assert run.returncode == 0, run.output[-4000:]
    workers = run.spec.nproc // run.spec.nodes
    lost_nodes = {slot // workers for slot in parted.lost - {*killed}}
    # Never both of them, and never another one.
    assert lost_nodes <= {*cut.pair} and len(lost_nodes) <= 1, parted.ranks
    assert not disagreeing_steps(run.files)
    assert not run.orphans
    assert audit_samples(run.files, batches=run.spec.batches) == (0, 0)
    assert len(run.trace()) == len(run.spec.batches)
    assert parted.pause_s < WITHIN_S, parted.pause_s
