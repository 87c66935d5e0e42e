"""The cost of a hang, and of a death, under torchft here: the time to a survivor's next commit.

python -m benchmarks.torchft_hangs --python PYTHON [--runs 3] [--nproc 4] [--json FILE]

PYTHON has torch and torchft. One replica is stopped (SIGSTOP), or killed, while the others wait for
it in an all-reduce, under torchft's own timeouts; a tiny linear model, since it is the waiting that
is measured. The job is `benchmarks/torchft_job.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import options_parser, run_benchmark
from benchmarks.recovery import median_and_max
from elaswave_plugin.errors import ConfigurationError, ElasWaveError

JOB = Path(__file__).with_name("torchft_job.py")
RUN_LIMIT_S = 240.0
# What the job exits with where a survivor does not commit again within 200 s.
NOT_BACK = 3


def version_in(python: str) -> str:
    """The version of torchft there; raises ConfigurationError."""
    ask = (
        "import torchft._torchft; from importlib.metadata import packages_distributions, version;"
        " name = packages_distributions()['torchft'][0]; print(name, version(name))"
    )
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=120)
    except OSError as error:
        raise ConfigurationError(f"--python is {python!r}, which does not run: {error}") from error
    if found.returncode:
        raise ConfigurationError(
            f"--python is {python!r}, where torchft cannot be imported; install it there"
            " (pip install torch torchft), in an environment of its own"
        )
    return found.stdout.strip()


def one_run(python: str, how: str, replicas: int) -> dict[str, Any]:
    """One job: how long the slowest survivor took to commit a step again."""
    with tempfile.TemporaryDirectory(prefix="elaswave-torchft-") as name:
        folder = Path(name)
        command = [python, str(JOB), name, how, str(replicas)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
        if done.returncode == NOT_BACK:
            return {"how": how, "back_s": None}
        if done.returncode:
            raise ElasWaveError(f"the torchft job failed: {done.stderr[-2000:]}")
        lines = [
            [json.loads(line) for line in (folder / f"replica-{number}").read_text().splitlines()]
            for number in range(replicas)
        ]
    fault_s = lines[-1][-1][1]
    after = [[one for one in survivor if one[1] > fault_s] for survivor in lines[:-1]]
    back = [next(one for one in survivor if one[2]) for survivor in after]
    return {
        "how": how,
        "back_s": max(one[1] for one in back) - fault_s,
        "discarded_steps": max(
            sum(not one[2] for one in survivor[: survivor.index(first)])
            for survivor, first in zip(after, back, strict=True)
        ),
        "participants": back[0][3],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run them all; raises ConfigurationError, ElasWaveError."""
    if options.runs < 1:
        raise ConfigurationError(f"--runs is {options.runs}, wanted at least 1")
    if options.nproc < 3:
        raise ConfigurationError(f"--nproc is {options.nproc}, wanted at least 3: two have to stay")
    result = {
        **circumstances("benchmarks.torchft_hangs"),
        # Where it is installed is nobody's business.
        "command": f"python -m benchmarks.torchft_hangs --python PYTHON --runs {options.runs}",
        "torchft": version_in(options.python),
        "replicas": options.nproc,
    }
    rows = []
    for how in ("stop", "kill"):
        for _ in range(options.runs):
            rows.append(one_run(options.python, how, options.nproc))
            back_s = rows[-1]["back_s"]
            told = "not back in time" if back_s is None else f"back after {back_s:.2f} s"
            print(f"{how}: {told}", flush=True)
    figures = {
        how: median_and_max(
            [row["back_s"] for row in rows if row["how"] == how and row["back_s"] is not None]
        )
        for how in ("stop", "kill")
    }
    return {**result, "back_s": figures, "rows": rows}


def main() -> int:
    """Read the options and measure."""
    parser = options_parser(__doc__)
    parser.add_argument("--python", default=sys.executable, help="a Python that has torchft")
    parser.add_argument("--runs", type=int, default=3, help="runs with each fault")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    raise SystemExit(main())
