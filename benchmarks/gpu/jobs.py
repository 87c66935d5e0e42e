"""Jobs of the demo's size on a device, with faults, and whether they equal their reference."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.measurement import bench
from elaswave_plugin.config import Kill
from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.options import GLOBAL_BATCH, DemoOptions
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import RunFiles, read_run

# On a GPU a trainer makes its CUDA context first, and the one that comes back does so as well.
JOB_LIMIT_S = 60.0
HANG_TIMEOUT_S = 2.0
HOST_WORKERS = 4
ONE_DEVICE = Path(__file__).with_name("one_device.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Runs of one script on one machine, from a zygote and a dataset that all of them share."""

    options: DemoOptions
    folder: Path
    socket_path: Path
    gpu_engine: str

    @property
    def is_exact(self) -> bool:
        """True where a run has to equal the undisturbed one, not the planned departure."""
        return self.options.framework == "megatron"

    def run(
        self,
        name: str,
        *,
        kills: Sequence[Kill] = (),
        changes: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> RunFiles:
        """Run a job to its end and read its files; raises JobFailed.

        `changes`: planned departures and returns.
        """
        directory = self.folder / name
        given = {
            "dir": str(directory),
            "dump_state": "last",
            "wandb": "off",
            "respawn": 1 if changes else 0,
            "data_timeout_s": HANG_TIMEOUT_S,
            "hang_timeout_s": HANG_TIMEOUT_S,
            "gpu_engine": self.gpu_engine,
            "kill": [str(one) for one in kills],
            "change": list(changes),
            **(settings or {}),
        }
        launch = [sys.executable, "-m", "elaswave_plugin.cli.main", "run"]
        launch += ["--nproc-per-node", str(self.options.nproc), "--zygote", str(self.socket_path)]
        shares_device = self.gpu_engine == "host" and self.options.framework == "deepspeed"
        before = [str(ONE_DEVICE)] if shares_device else []
        launch += ["--dir", str(directory), *before, str(self.options.script)]
        data = self.folder / "data" / "text"
        arguments = jobs.arguments(self.options, data=data, settings=given)
        log = self.folder / f"{name}.log"
        try:
            jobs.run_job([*launch, *arguments], f"run {name}", log, limit_s=JOB_LIMIT_S)
        finally:
            # The folder goes away, the item's own log stays.
            print(f"---- {name}", log.read_text(errors="replace")[-4000:], sep="\n", flush=True)
        return read_run(directory)

    def summary(self, run: RunFiles, reference: RunFiles, kills: Sequence[Kill]) -> dict[str, Any]:
        """Judge a run by its files against what it has to equal."""
        steps = self.options.steps
        return summarize(run, reference, steps=steps, global_batch=GLOBAL_BATCH, kills=kills)


@contextmanager
def prepared(
    device: Device, gpu_engine: str, framework: str, *, steps: int, zero: int | None = None
) -> Iterator[Jobs]:
    """Start what the jobs share; raises ConfigurationError, JobFailed.

    `gpu_engine` host: four workers on the first GPU; nccl: one on each GPU.
    """
    nproc = HOST_WORKERS
    if gpu_engine == "nccl":
        # A step has eight micro-batches, which are dealt out evenly.
        nproc = max(n for n in (2, 4, 8) if n <= device.count)
    elif not device.is_stand_in:
        os.environ["CUDA_VISIBLE_DEVICES"] = first_visible(os.environ)
    with bench(nproc=nproc, steps=steps, framework=framework, zero=zero) as shared:
        yield Jobs(
            options=shared.options,
            folder=shared.folder,
            socket_path=shared.socket_path,
            gpu_engine="host" if device.is_stand_in else gpu_engine,
        )


def first_visible(environ: Mapping[str, str]) -> str:
    """Return the first GPU that this process may use.

    >>> first_visible({"CUDA_VISIBLE_DEVICES": "3,5"}), first_visible({})
    ('3', '0')
    """
    return environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def equals(summary: Mapping[str, Any]) -> bool:
    """Return whether losses and state have the reference's bits, and no sample was lost by it."""
    return (
        summary["parameters_equal"] is True
        and summary["max_abs_loss_diff"] == 0
        and not summary["samples_lost"]
        and not summary["samples_repeated"]
    )
