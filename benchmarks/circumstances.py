"""The circumstances of a measurement, with which every result file begins: when, where and how."""

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GPUS = Path("/proc/driver/nvidia/gpus")
# `git archive` writes the commit into it, so that a bundle without git knows it.
EXPORTED = Path(__file__).with_name("exported_commit.txt")


def circumstances(module: str | None = None) -> dict[str, Any]:
    """Call it first: the load is that of the last minutes before.

    ``module``: what Python runs, None for our own command. The commit is None where this is run
    neither from a checkout of git nor from an archive of one.
    """
    command = ["elaswave"] if module is None else ["python", "-m", module]
    gpus = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    return {
        "command": shlex.join([*command, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": described_commit(),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, {gpus or 'no'} GPU",
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def described_commit() -> str | None:
    """Describe the checkout that this file is in, with "-dirty" where it differs.

    Result files may differ: of several measurements in a row, the first ones' files are written
    before the last. None where this is neither a checkout of git nor an archive of one.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        exported = EXPORTED.read_text().strip() if EXPORTED.is_file() else "$"
        return None if exported.startswith("$") else exported
    changed = _git(
        *("status", "--porcelain", "--untracked-files=no", "--"),
        *(":/", ":(top,exclude)benchmarks/*.json"),
    )
    return f"{_git('describe', '--always', '--exclude=*')}{'-dirty' if changed else ''}"


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
