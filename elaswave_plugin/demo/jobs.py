"""Starts and ends the demo's processes: the zygote, the writer of the dataset and the two jobs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from elaswave_plugin.demo.options import (
    ATTENTION_HEADS,
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEQUENCE_LENGTH,
    DemoOptions,
)
from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.ipc.process_tree import die_with_parent

_ALWAYS = ("torch", "numpy", "pydantic")
_MEGATRON = (
    "elaswave_plugin.adapters.megatron",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_model",
)
_DEEPSPEED = (
    "deepspeed",
    "elaswave_plugin.adapters.deepspeed.attach",
    # What deepspeed.initialize imports, which takes two seconds in each process.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "torch._dynamo",
)


def preload_of(framework: str) -> tuple[str, ...]:
    """Modules that the demo's zygote imports."""
    return (*_ALWAYS, *(_DEEPSPEED if framework == "deepspeed" else _MEGATRON))


def write_plain_text(options: DemoOptions, path: Path) -> None:
    """Write the files of the source into one, for a script that reads bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0".join(one.read_bytes() for one in options.source.paths))


def arguments(options: DemoOptions, *, data: Path, settings: Mapping[str, Any]) -> list[str]:
    """The script's arguments; `settings` are the plugin's own, by their keys."""
    sizes = [
        *("--num-layers", str(options.layout.num_layers)),
        *("--hidden-size", "128"),
        *("--num-attention-heads", str(ATTENTION_HEADS)),
        *("--seq-length", str(SEQUENCE_LENGTH)),
        *("--seed", str(options.seed)),
    ]
    if options.framework == "megatron":
        return [*_megatron_arguments(options, data), *sizes, "--elaswave", *_as_options(settings)]
    return [*_deepspeed_arguments(options, data, settings), *sizes]


def _megatron_arguments(options: DemoOptions, data: Path) -> list[str]:
    return [
        *("--data-path", str(data)),
        *("--train-iters", str(options.steps)),
        *("--micro-batch-size", str(MICRO_BATCH)),
        *("--global-batch-size", str(GLOBAL_BATCH)),
        *(_parallel(options) if options.is_hybrid else ()),
    ]


def _parallel(options: DemoOptions) -> list[str]:
    layout = options.layout
    return [
        *("--tensor-model-parallel-size", str(layout.tp)),
        *("--pipeline-model-parallel-size", str(len(layout.stages))),
        *(["--sequence-parallel"] if layout.tp > 1 else []),
    ]


def _as_options(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in settings.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--elaswave-{key.replace('_', '-')}", str(one)]
    return words


def _deepspeed_arguments(
    options: DemoOptions, data: Path, settings: Mapping[str, Any]
) -> list[str]:
    """The shipped configuration with the demo's sizes and settings, written beside the run."""
    folder = Path(__file__).resolve().parents[2] / "configs"
    shipped = folder / f"deepspeed_zero{max(1, options.zero)}.json"
    config = json.loads(shipped.read_text())
    config["train_batch_size"] = GLOBAL_BATCH
    config["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    config["gradient_accumulation_steps"] = GLOBAL_BATCH // (MICRO_BATCH * options.nproc)
    config["zero_optimization"]["stage"] = options.zero
    config["elaswave"] = {"enabled": True, **settings}
    path = Path(f"{settings['dir']}.json")
    path.write_text(json.dumps(config, indent=2) + "\n")
    return [
        *("--deepspeed_config", str(path)),
        *("--text", str(data)),
        *("--steps", str(options.steps)),
    ]


ZYGOTE_LIMIT_S = 180.0
JOB_LIMIT_S = 900.0
END_LIMIT_S = 10.0
LOOK_INTERVAL_S = 0.05
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 15
RESPAWN = 10
DATA_TIMEOUT_S = 2.0


class JobFailed(ElasWaveError):
    """A process of the demo ended with an error; `exit_code` is its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def running(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that dies with us, its output in a file; ends it on the way out.

    ``env``: variables beside our own.
    """
    # One thread a worker: more would fight for the cores and change the order of sums.
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    # Python drops what a signal raises in the middle of a fork.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                preexec_fn=partial(_begin, os.getpid(), mask),
            )
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield process
    finally:
        end(process)


def _begin(parent_pid: int, mask: Iterable[int]) -> None:
    die_with_parent(parent_pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def zygote(log: Path, preload: Sequence[str]) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Start a zygote; yields it and the socket, which appears when its imports are done."""
    # Not under OUT: the path of a socket may have 107 characters only.
    with tempfile.TemporaryDirectory(prefix="elaswave-") as folder:
        path = Path(folder) / "zygote"
        # The frameworks warn about what they miss on a CPU; every worker would repeat it.
        command = [sys.executable, "-W", "ignore", "-m", "elaswave_plugin.trainer.zygote"]
        command += ["--socket", str(path), "--preload", ",".join(preload)]
        with running(command, log) as process:
            yield process, path


def wait_until_ready(process: "subprocess.Popen[bytes]", path: Path, log: Path) -> None:
    """Wait until the zygote serves; raises JobFailed if it ends or takes longer than the limit."""
    deadline_s = time.monotonic() + ZYGOTE_LIMIT_S
    while not path.exists():
        if process.poll() is not None:
            raise failure("the zygote", process, log)
        if time.monotonic() > deadline_s:
            raise JobFailed(f"the zygote was not ready after {ZYGOTE_LIMIT_S:g} s", 1)
        time.sleep(LOOK_INTERVAL_S)


def write_dataset(options: DemoOptions, text: Path | None, prefix: Path, log: Path) -> None:
    """Write the dataset in a process of its own; raises JobFailed."""
    command = [sys.executable, "-W", "ignore", "-m", "elaswave_plugin.demo.text", str(prefix)]
    run_job([*command, *([str(text)] if text else [])], f"writing {options.source.name}", log)


@contextmanager
def prepared(options: DemoOptions, text: Path | None, *, data: Path, logs: Path) -> Iterator[Path]:
    """Start a zygote and write the dataset meanwhile; yields the socket; raises JobFailed."""
    log = logs / "zygote.log"
    with zygote(log, preload_of(options.framework)) as (process, socket_path):
        if options.framework == "megatron":
            write_dataset(options, text, data, logs / "data.log")
        else:
            write_plain_text(options, data)
        wait_until_ready(process, socket_path, log)
        yield socket_path


def job_command(
    options: DemoOptions,
    *,
    socket_path: Path,
    data: Path,
    directory: Path,
    wandb: str = "off",
    kill: bool = False,
    change: bool = False,
    alternate: str = "",
) -> list[str]:
    """Return the command line of one run.

    `kill` says whether its kills take place, `change` whether the same workers leave as planned,
    at the same steps; `alternate` names the part of the plugin that is on
    and off in turn (see ``benchmarks/alternate.py``), none if empty.
    """
    launch = [sys.executable, "-m", "elaswave_plugin.cli.main", "run"]
    launch += ["--nproc-per-node", str(options.nproc), "--zygote", str(socket_path)]
    launch += ["--dir", str(directory)]
    if alternate:
        launch += [str(Path(__file__).parents[2] / "benchmarks" / "alternate.py"), alternate]
    launch += [str(options.script)]
    settings: dict[str, object] = {
        "dir": str(directory),
        "dump_state": "last",
        "wandb": wandb,
        "respawn": RESPAWN if options.respawn else 0,
        # Its data is in memory: who does not get it hangs, as in any other phase.
        "data_timeout_s": DATA_TIMEOUT_S,
        "kill": [str(one) for one in options.kills] if kill else [],
        "change": [f"{one.slot}@{one.step}" for one in options.kills] if change else [],
    }
    return [*launch, *arguments(options, data=data, settings=settings)]


def run_job(
    command: Sequence[str],
    name: str,
    log: Path,
    *,
    look: Callable[[], None] = lambda: None,
    limit_s: float = JOB_LIMIT_S,
) -> None:
    """Run a process to its end, looking at its files meanwhile; raises JobFailed if it fails."""
    deadline_s = time.monotonic() + limit_s
    with running(command, log) as process:
        while process.poll() is None:
            look()
            if time.monotonic() > deadline_s:
                raise JobFailed(f"{name} was not done after {limit_s:g} s; see {log}", 1)
            time.sleep(LOOK_INTERVAL_S)
        look()
        if process.returncode:
            raise failure(name, process, log)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process of ours: SIGTERM first, so that a launcher ends its workers itself."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_LIMIT_S)


def failure(name: str, process: "subprocess.Popen[bytes]", log: Path) -> JobFailed:
    """Describe a failed process by the last lines that it wrote."""
    code = process.returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code == 2 and lines:
        return JobFailed(lines[-1], 2)
    text = "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
    return JobFailed(f"{name} ended with exit code {code}; the end of {log}:\n{text}", code or 1)
