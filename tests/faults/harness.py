"""Runs the example training script under `elaswave run` and reads what it left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psutil

from elaswave_plugin.config import FINALIZE_PHASE, SAVE_PHASE, Kill, parse_kill
from elaswave_plugin.ipc.reactor import is_readable
from elaswave_plugin.observer.observer import (
    audit_samples,
    disagreeing_steps,
    kills_of,
    losses_of,
    recoveries_of,
    summarize,
)
from elaswave_plugin.observer.observer import survivor_pids_unchanged as pids_unchanged
from elaswave_plugin.observer.run import RunFiles, counted_steps, read_run
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from elaswave_plugin.tracking.state_dump import dumped_steps, hash_state
from tests.faults import warm_launcher
from tests.faults.warm_launcher import WarmLauncher
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SABOTAGED = ROOT / "tests" / "faults" / "sabotaged.py"
WALK = ROOT / "tests" / "faults" / "walk_live_objects.py"
ALTERNATE = ROOT / "benchmarks" / "alternate.py"
SCRIPT = ROOT / "examples" / "train_gpt.py"
# What torch 2.13 and 2.14 import when something is first profiled; 2.15 has it no more.
FIRST_PROFILED = tuple(name for name in ("torch.profiler._cupti_monitor",) if find_spec(name))
PRELOAD = (
    "torch",
    "numpy",
    "pydantic",
    "elaswave_plugin.adapters.megatron",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_model",
    # What the script and its first step import.
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.strategies.torch",
    *FIRST_PROFILED,
)
Trace = dict[int, tuple[str, str, str]]
ZYGOTE_START_S = 90.0
RUN_LIMIT_S = 100.0
# Of a launch with more than these steps, which take a fraction of a second each.
STEPS_WITHIN_IT, STEP_LIMIT_S = 500, 0.2
# Beyond the limit of a hang, on two cores that others share: to see it, to recover, one step.
HANG_SLACK_S = 2.0


# The trainers of these slots die at once, in the backward pass of the last one's step 3.
LOSE = """
import json, os, signal
from elaswave_plugin.recovery.phases import Phases
enter = Phases.enter
def die(self, phase):
    if self._slot == {slots}[-1] and (self.step, phase) == (3, "backward"):
        lines = open(self._events.path).read().splitlines()
        started = [e for e in map(json.loads, lines) if e["kind"] == "worker_started"]
        for slot in {slots}:  # the own one last: this process ends with it
            (pid,) = [e["pid"] for e in started if e["slot"] == slot]
            os.kill(pid, signal.SIGKILL)
    enter(self, phase)
Phases.enter = die
"""
# These nodes are lost at once, with all that they hold: only copies on others are left of it.
LOSE_NODES = """
import json, os, signal
from elaswave_plugin.recovery.phases import Phases
enter_phase = Phases.enter
def lose(self, phase):
    if self._slot == {last} and (self.step, phase) == (3, "backward"):
        lines = open(self._events.path).read().splitlines()
        guardians = {{e["node"]: e["guardian_pid"] for e in map(json.loads, lines)
                     if e["kind"] == "agent_started"}}
        for node in {nodes}:  # the own one last: this process ends with it
            os.kill(guardians[node], signal.SIGKILL)
        signal.pause()
    enter_phase(self, phase)
Phases.enter = lose
"""


# Batches that come once so many replacements wait to be let in, and replacements that ask for it
# only once they are awaited: at which step they enter is then certain, however fast they are.
AWAIT = """
import json, time
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_now, ask_now = GuardedSteps.begin, Worker.ask_to_enter
def ready(worker):
    return sum('"worker_ready"' in line for line in open(worker.events.path))
def awaited(worker):
    lines = open(worker.events.path)
    # The last one may still be written.
    events = (json.loads(line) for line in lines if line.endswith("\\n"))
    return max((e["number"] for e in events if e["kind"] == "replacement_awaited"), default=0)
def begin_when_ready(self):
    begin_now(self)
    worker, wanted = self.worker, {awaits}.get(self.worker.completed, 0)
    if wanted:
        worker.events.emit("replacement_awaited", number=wanted)
    worker.member.announce("a slow batch")
    try:
        deadline_s = time.monotonic() + 60
        while ready(worker) < wanted:
            worker.member.check()
            assert time.monotonic() < deadline_s, "no replacement came"
            time.sleep(0.005)
    finally:
        worker.member.announce(None)
def ask_when_awaited(self):
    deadline_s = time.monotonic() + 60
    while awaited(self) <= ready(self):
        assert time.monotonic() < deadline_s, "no replacement was awaited"
        time.sleep(0.005)
    ask_now(self)
GuardedSteps.begin, Worker.ask_to_enter = begin_when_ready, ask_when_awaited
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One launch of the example: a tiny GPT whose every step takes a fraction of a second."""

    nproc: int = 4
    nodes: int = 1
    steps: int = 6
    global_batch: int = 8
    options: tuple[str, ...] = ()
    kills: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    consistency: str = "exact"
    respawn: int = 0
    # Other work on the machine makes workers slow: it must not change the views of a test.
    slow_workers: str = "name"
    dump: str = "every"
    sabotage: str = ""
    awaits: tuple[tuple[int, int], ...] = ()
    lost_trainers: tuple[int, ...] = ()
    lost_nodes: tuple[int, ...] = ()
    # Slots whose worker fails by itself, as the sabotage or the script has it.
    failing: tuple[int, ...] = ()
    walk: str = ""
    alternate: str = ""
    launcher: tuple[str, ...] = ()
    script: str = str(SCRIPT)
    # Global batches that each step reads.
    reads: int = 1
    # Workers that join the job as soon as it has begun.
    joiners: int = 0
    # Faults that are no kills: a test carries them out.
    strikes: tuple[Any, ...] = ()

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its zygote has imported."""
        return PRELOAD

    @property
    def batches(self) -> Sequence[int]:
        """Samples of each step."""
        return self.steps * [self.reads * self.global_batch]

    def undisturbed(self) -> Self:
        """The same job without faults, departures and returns."""
        spec = replace(self, kills=(), changes=(), lost_trainers=(), lost_nodes=(), joiners=0)
        return replace(spec, awaits=(), sabotage="", respawn=0) if spec.awaits else spec

    @property
    def faults(self) -> tuple[Any, ...]:
        """The strikes, or the kills: dataclasses with a ``step``, a ``phase`` and a text."""
        return self.strikes or tuple(map(parse_kill, self.kills))

    def struck_by(self, faults: Sequence[Any]) -> Self:
        """The same job with these faults."""
        kills = tuple(str(fault) for fault in faults if isinstance(fault, Kill))
        strikes = tuple(fault for fault in faults if not isinstance(fault, Kill))
        return replace(self, kills=kills, strikes=strikes)

    def step_with(self, phase: str, first: int) -> int:
        """The first step from ``first`` on in which a worker is in this phase."""
        return first

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The script's arguments."""
        arguments = [
            f"--data-path={data / 'text'}",
            f"--data-cache-path={data / 'cache'}",
            "--num-layers=2",
            "--hidden-size=64",
            "--seq-length=32",
            "--ddp-bucket-size=30000",
            f"--train-iters={self.steps}",
            f"--global-batch-size={self.global_batch}",
            *self.options,
            "--elaswave",
            f"--elaswave-dir={directory}",
            f"--elaswave-consistency={self.consistency}",
            f"--elaswave-dump-state={self.dump}",
            f"--elaswave-respawn={self.respawn}",
            f"--elaswave-slow-workers={self.slow_workers}",
            # As soon as in the other phases: no storage stalls here.
            "--elaswave-data-timeout-s=2",
        ]
        arguments += [f"--elaswave-kill={kill}" for kill in self.kills]
        return arguments + [f"--elaswave-change={change}" for change in self.changes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished launch."""

    spec: JobSpec
    directory: Path
    returncode: int
    output: str
    seconds: float
    orphans: tuple[int, ...] = field(default=())
    # What the run left is final: it is read once, and the state hashed once.
    _files: list[RunFiles] = field(default_factory=list, init=False, repr=False, compare=False)
    _traces: list[Trace] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def files(self) -> RunFiles:
        """The files that the run wrote."""
        if not self._files:
            self._files.append(read_run(self.directory))
        return self._files[0]

    def events(self, kind: str) -> tuple[dict[str, Any], ...]:
        """The events of one kind."""
        return self.files.of_kind(kind)

    def trace(self) -> Trace:
        """Per step: loss and grad norm in hex, and the SHA-256 of the whole state."""
        if not self._traces:
            self._traces.append(self._hashed())
        return self._traces[0]

    def _hashed(self) -> Trace:
        steps = counted_steps(self.files)
        dumped = set(dumped_steps(self.directory))
        return {
            step: (
                records[0]["loss_hex"],
                records[0]["grad_norm_hex"],
                hash_state(self.directory, step).sha256 if step in dumped else "",
            )
            for step, records in steps.items()
        }


class Zygote:
    """Two zygotes shared by many launches: of trainers with the frameworks, and of launchers."""

    def __init__(
        self, folder: Path, preload: tuple[str, ...] = PRELOAD, *, path: tuple[Path, ...] = ()
    ) -> None:
        """``path``: where modules are looked for first."""
        known = os.environ.get("PYTHONPATH")
        self._path = os.pathsep.join([*map(str, path), *([known] if known else [])])
        self.socket = folder / "zygote.sock"
        self.launchers = folder / "launchers.sock"
        self._processes = [
            self._start(self.launchers, (warm_launcher.PRELOAD,)),
            self._start(self.socket, preload),
        ]
        deadline_s = time.monotonic() + ZYGOTE_START_S
        while not (self.socket.exists() and self.launchers.exists()):
            codes = [process.poll() for process in self._processes]
            if any(code is not None for code in codes) or time.monotonic() > deadline_s:
                self.close()
                raise RuntimeError(f"a zygote did not start: {codes}")
            time.sleep(0.05)

    def _start(self, socket: Path, preload: tuple[str, ...]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-W", "ignore", "-m", "elaswave_plugin.trainer.zygote"]
        command += [f"--socket={socket}", f"--preload={','.join(preload)}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self._path:
            environ["PYTHONPATH"] = self._path
        return subprocess.Popen(command, env=environ)

    def close(self) -> None:
        """Stop them."""
        for process in self._processes:
            process.terminate()
            process.wait(timeout=20)


def sabotage_of(spec: JobSpec) -> str:
    """Return the statements with which each worker of a job begins."""
    found = spec.sabotage + (AWAIT.format(awaits=dict(spec.awaits)) if spec.awaits else "")
    if spec.lost_trainers:
        found += LOSE.format(slots=list(spec.lost_trainers))
    if spec.lost_nodes:
        found += lose_nodes(spec, spec.lost_nodes)
    return found


def lose_nodes(spec: JobSpec, nodes: Sequence[int]) -> str:
    """Return the statements by which these nodes are lost in step 3, the last one's in its own."""
    return LOSE_NODES.format(nodes=list(nodes), last=nodes[-1] * (spec.nproc // spec.nodes))


def _arguments(
    spec: JobSpec, place: list[str], *, zygote: Zygote, data: Path, directory: Path
) -> list[str]:
    """A launcher's arguments; `place`: its options beyond those that all nodes have."""
    return [
        *place,
        *([] if _has_zygote(spec) else [f"--zygote={zygote.socket}"]),
        f"--dir={directory}",
        *([str(SABOTAGED), sabotage] if (sabotage := sabotage_of(spec)) else []),
        *([str(WALK), spec.walk] if spec.walk else []),
        *([str(ALTERNATE), spec.alternate] if spec.alternate else []),
        spec.script,
        *spec.arguments(data, directory),
    ]


def _has_zygote(spec: JobSpec) -> bool:
    """Return whether its launcher starts a zygote of its own."""
    return any(option.startswith("--preload") for option in spec.launcher)


def _places(spec: JobSpec) -> list[list[str]]:
    """The options of the launchers, one a node."""
    meeting = [f"--nnodes={spec.nodes}", f"--master-port={free_port()}"] if spec.nodes > 1 else []
    width = f"--nproc-per-node={spec.nproc // spec.nodes}"
    return [[width, *meeting, f"--node-rank={n}", *spec.launcher] for n in range(spec.nodes)]


def open_launcher(
    spec: JobSpec, place: list[str], *, zygote: Zygote, data: Path, directory: Path
) -> WarmLauncher:
    """Start a launcher of a job; its output goes to DIRECTORY/output."""
    with (directory / "output").open("ab") as output:
        return WarmLauncher(
            zygote.launchers,
            _arguments(spec, place, zygote=zygote, data=data, directory=directory),
            output=output.fileno(),
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@contextlib.contextmanager
def started(
    spec: JobSpec, *, zygote: Zygote, data: Path, directory: Path
) -> Iterator[list[WarmLauncher]]:
    """Start a job's launchers, their output in DIRECTORY/output; they are ended on the way out."""
    directory.mkdir(parents=True, exist_ok=True)
    processes: list[WarmLauncher] = []
    try:
        for place in _places(spec):
            processes.append(
                open_launcher(spec, place, zygote=zygote, data=data, directory=directory)
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        try:
            for process in processes:
                process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=20)
            raise


def launch(spec: JobSpec, *, zygote: Zygote, data: Path, directory: Path) -> Outcome:
    """Run a job to its end; the whole process tree is checked to be gone afterwards."""
    started_s = time.monotonic()
    codes = [-1]
    with (
        started(spec, zygote=zygote, data=data, directory=directory) as processes,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        limit_s = RUN_LIMIT_S + STEP_LIMIT_S * max(0, spec.steps - STEPS_WITHIN_IT)
        codes = [process.wait(timeout=limit_s) for process in processes]
        # Those of lost nodes were killed.
        codes = [code for node, code in enumerate(codes) if node not in spec.lost_nodes]
    return Outcome(
        spec=spec,
        directory=directory,
        returncode=next((code for code in codes if code), 0),
        output=(directory / "output").read_text(),
        seconds=time.monotonic() - started_s,
        orphans=left_alive(pids_of(directory), limit_s=0.0)
        + left_alive(started_under(directory), limit_s=5.0),
    )


def pids_of(directory: Path) -> tuple[int, ...]:
    """Trainers and agents of a run, by the process ids that they announced."""
    events = [e for e in read_lines(directory / EVENTS_FILE) if e["kind"] == "worker_started"]
    return tuple(sorted(event[key] for event in events for key in ("pid", "agent_pid")))


def started_under(directory: Path) -> tuple[int, ...]:
    """Processes with the run's directory in their environment: whatever its workers started.

    What a worker has forked has its title, and so no environment: it is in the worker's group.
    """
    found, leaders = [], {*pids_of(directory)}
    for process in psutil.process_iter():
        # Processes that end meanwhile, and those of other users, are not ours.
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_here = process.environ().get("ELASWAVE_DIR") == str(directory)
            is_here = is_here or os.getpgid(process.pid) in leaders
            if is_here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return tuple(found)


def processes_of(directory: Path, *, node: int) -> tuple[int, ...]:
    """Guardian, newest agent and trainers of a node, by the process ids that they announced."""
    events = [e for e in read_lines(directory / EVENTS_FILE) if e.get("node") == node]
    agent = [e for e in events if e["kind"] == "agent_started"][-1]
    trainers = {e["slot"]: e["pid"] for e in events if e["kind"] == "worker_started"}
    return agent["guardian_pid"], agent["pid"], *trainers.values()


def left_alive(pids: tuple[int, ...], *, limit_s: float) -> tuple[int, ...]:
    """Those of the processes that still run when all are gone or the time is up."""
    deadline_s = time.monotonic() + limit_s
    left = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if not is_readable(pidfd, max(0.0, deadline_s - time.monotonic())):
                left.append(pid)
            os.close(pidfd)
    return tuple(left)


def check_survived(run: Outcome) -> None:
    """Check what every survived fault promises, in any mode; asserts that the faults fired."""
    check_went_on(run)
    assert audit_samples(of_its_own(run.files), batches=run.spec.batches) == (0, 0)


def check_went_on(run: Outcome) -> None:
    """Check the same except for samples, which a lost worker may have taken with it."""
    assert run.returncode == 0, run.output[-4000:]
    kills = [parse_kill(kill) for kill in run.spec.kills]
    assert all(kill["fired"] for kill in kills_of(run.files, kills)), kills_of(run.files, kills)
    check_written(run)
    width = run.spec.nproc // run.spec.nodes
    lost = {slot for slot in range(run.spec.nproc) if slot // width in run.spec.lost_nodes}
    lost |= {*run.spec.lost_trainers}
    assert lost.isdisjoint(run.events("view_committed")[-1]["ranks"])
    # A worker that fails by itself is survived too, and its loss would go unseen.
    if run.spec.failing or not run.spec.sabotage:
        assert failed_by_themselves(run) == {*run.spec.failing}, run.output[-4000:]
    departures = [change for change in run.spec.changes if not change.startswith("+")]
    assert len(run.events("departed")) == len(departures)
    # Each of the launch may be lost once the ones before it are back.
    in_all = set.intersection(*(set(event["ranks"]) for event in run.events("view_committed")))
    assert pids_unchanged(run.files) or not in_all
    assert not disagreeing_steps(run.files)
    assert not run.orphans
    assert len(run.trace()) == len(run.spec.batches)
    check_judged(run)


def of_its_own(files: RunFiles) -> RunFiles:
    """The files, with samples counted from where this run begins: at the front, or as resumed.

    A loop of its own may begin at the front after it has loaded a checkpoint, and is told so.
    """
    trained = max((line.get("trained", 0) for line in files.ledger), default=0)
    if not trained:
        return files
    first = min(sample for line in files.ledger for sample in line["samples"])
    assert first in {0, trained}, (first, trained)
    return replace(files, ledger=tuple({**line, "trained": first} for line in files.ledger))


def failed_by_themselves(run: Outcome) -> set[int]:
    """Slots of workers that failed before the job was over, and were not told to leave."""
    over_s = min((event["time_s"] for event in run.events("job_over")), default=float("inf"))
    ended = [event for event in run.events("worker_exited") if event["time_s"] < over_s]
    failed = {e["slot"] for e in ended if re.fullmatch(r"exit code [1-9]\d*", e["status"])}
    reasons = " ".join(event["reason"] for event in run.events("view_committed"))
    told = re.findall(r"worker (\d+) \(node \d+\) (?:left|was lost)", reasons)
    return failed - {*map(int, told)}


def check_written(run: Outcome) -> None:
    """A fault of a save struck when files of the checkpoint had bytes, and it had no name yet."""
    for fault in run.events("fault_fired"):
        if fault["phase"] in (SAVE_PHASE, FINALIZE_PHASE):
            assert fault["bytes_written"] > 0, fault


def check_judged(run: Outcome) -> None:
    """The judge of `elaswave report` and the demo takes what the run left, and finds it alike."""
    summary = summarize(run.files, None, steps=run.spec.steps, global_batch=None)
    assert not summary["differing_reports"]
    json.dumps(summary)


def check_equal(run: Outcome, reference: Outcome) -> None:
    """Everything that exact mode promises, against the run that was not disturbed."""
    check_survived(run)
    assert run.trace() == reference.trace()


def hang_of(run: Outcome) -> dict[str, Any]:
    """The only hang of a run; its worker was killed before its limit, and not long before."""
    every = run.events("hang_found")
    assert len(every) == 1, every
    (found,) = every
    ended = next(e for e in run.events("worker_exited") if e["slot"] == found["slot"])
    assert ended["evidence"].startswith(f"no progress for {found['stalled_s']:.1f} s")
    may_stall_s = found["limit_s"] - min(0.4, 0.2 * found["limit_s"])
    (recovery,) = recoveries_of(run.files)
    assert may_stall_s <= found["stalled_s"] <= recovery["mttr_s"] + 0.1
    # While it waits for a processor it is not known to hang.
    assert recovery["mttr_s"] < found["limit_s"] + found["waited_s"] + HANG_SLACK_S
    return found


def max_relative_difference(run: Outcome, reference: Outcome) -> float:
    """Largest relative difference of the losses of two runs."""
    ours, theirs = losses_of(run.files), losses_of(reference.files)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in ours)
