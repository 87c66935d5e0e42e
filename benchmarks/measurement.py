"""The shared parts of the benchmarks: jobs of the demo's size, results with their circumstances."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.options import DemoOptions, check_options
from elaswave_plugin.errors import ConfigurationError, ElasWaveError

RUN_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A zygote and a dataset that serve any number of runs, in a folder that goes away.

    ``arguments``: of the script beside the demo's, in which {directory} is that of the run.
    """

    options: DemoOptions
    folder: Path
    socket_path: Path
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.options.nproc} workers, {self.options.steps} steps a run"

    def run(self, name: str, options: DemoOptions, **how: Any) -> Path:
        """Run a job to its end and return its run directory; raises JobFailed.

        `how` is what ``jobs.job_command`` takes: kill, alternate.
        """
        directory = self.folder / name
        command = jobs.job_command(
            options,
            socket_path=self.socket_path,
            data=self.folder / "data" / "text",
            directory=directory,
            **how,
        )
        command += [one.format(directory=directory) for one in self.arguments]
        jobs.run_job(command, f"run {name}", self.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
        return directory


@contextmanager
def bench(
    *,
    nproc: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    steps: int,
    seed: int = 1234,
    framework: str = "megatron",
    zero: int | None = None,
) -> Iterator[Bench]:
    """Start what the runs share; raises ConfigurationError, JobFailed.

    ``zero`` is DeepSpeed's stage, None for another framework.
    """
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as name:
        folder = Path(name)
        options = check_options(
            text=None,
            nproc=nproc,
            tp=tp,
            pp=pp,
            dp=dp,
            steps=steps,
            kill=[],
            seed=seed,
            json_file=None,
            out=folder / "out",
            framework=framework,
            zero=zero,
        )
        with jobs.prepared(options, None, data=folder / "data" / "text", logs=folder) as path:
            yield Bench(options=options, folder=folder, socket_path=path)


def options_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--nproc", type=int, default=4, help="workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser


def run_benchmark(
    measure: Callable[[], dict[str, Any]],
    result_file: Path | None,
    *,
    good: Callable[[dict[str, Any]], bool] = lambda result: True,
) -> int:
    """Measure and write the result; returns the exit code, 0 only for a good result."""
    try:
        if result_file is not None and not result_file.absolute().parent.is_dir():
            raise ConfigurationError(f"--json is {str(result_file)!r}, whose folder does not exist")
        result = measure()
    except ElasWaveError as error:
        print(f"{error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    if result_file is not None:
        result_file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {result_file}")
    return 0 if good(result) else 1
