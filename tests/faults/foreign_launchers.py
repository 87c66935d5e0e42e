"""Runs a specification under a launcher that is not ours."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.harness import JobSpec, Outcome

TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run")


def run_under(
    launcher: Sequence[str], spec: JobSpec, *, data: Path, directory: Path, **env: str
) -> Outcome:
    """Run `launcher SCRIPT ARGUMENTS...` to its end, in a new directory."""
    directory.mkdir()
    finished = subprocess.run(
        [*launcher, spec.script, *spec.arguments(data, directory)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    return Outcome(
        spec=spec,
        directory=directory,
        returncode=finished.returncode,
        output=finished.stdout + finished.stderr,
        seconds=0.0,
    )
