"""Where, when and how something is measured: what every result file begins with."""

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GPUS = Path("/proc/driver/nvidia/gpus")


def circumstances(module: str | None = None) -> dict[str, Any]:
    """Call it first: the load is that of the last minutes before.

    ``module``: what Python runs, None for our own command. The commit is None where this is not run
    from a checkout of git.
    """
    command = ["elaswave"] if module is None else ["python", "-m", module]
    gpus = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    return {
        "command": shlex.join([*command, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, {gpus or 'no'} GPU",
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def _commit() -> str | None:
    """Of the checkout that this file is in, with a word where files differ from it."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
    except OSError:
        return None
    tracked = subprocess.run(
        ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
        capture_output=True,
        timeout=30.0,
    )
    return done.stdout.strip() if done.returncode == tracked.returncode == 0 else None
