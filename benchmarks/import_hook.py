"""Times `import torch` with and without our entry point, in turn: its cost where it is not used.

python -m benchmarks.import_hook [--repeat 20] [--json FILE]

torch's switch TORCH_DEVICE_BACKEND_AUTOLOAD turns off the look for entry points as well, so that
the difference of the processes is an upper bound; the part that is ours is timed within them.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import run_benchmark
from elaswave_plugin.errors import ConfigurationError

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LIMIT_S = 120.0
# torch has not called it here; so this is all that it does, its imports included.
OURS = """
import time
import torch
start = time.perf_counter()
from elaswave_plugin.autoload import watch
watch()
print(time.perf_counter() - start)
"""


def process_s(code: str, *, autoload: bool) -> tuple[float, str]:
    """Wall seconds of a process that runs the code, and what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, SWITCH: str(int(autoload))}
    start_s = time.perf_counter()
    done = subprocess.run(
        command, env=env, check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    return time.perf_counter() - start_s, done.stdout


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the alternations; raises ConfigurationError."""
    if options.repeat < 1:
        raise ConfigurationError(f"--repeat is {options.repeat}, wanted at least 1")
    result = circumstances("benchmarks.import_hook")
    process_s("import torch", autoload=True)  # so that the files are in memory
    on_s: list[float] = []
    off_s: list[float] = []
    ours_s: list[float] = []
    for _ in range(options.repeat):
        on_s.append(process_s("import torch", autoload=True)[0])
        off_s.append(process_s("import torch", autoload=False)[0])
        ours_s.append(float(process_s(OURS, autoload=False)[1]))
    result |= {
        "repeat": options.repeat,
        "with_s": {"median": median(on_s), "min": min(on_s), "all": on_s},
        "without_s": {"median": median(off_s), "min": min(off_s), "all": off_s},
        "difference_of_medians_s": median(on_s) - median(off_s),
        "our_part_s": {"median": median(ours_s), "max": max(ours_s), "all": ours_s},
    }
    print(
        f"import torch: median {1e3 * median(on_s):.1f} ms with, {1e3 * median(off_s):.1f} ms"
        f" without; our part {1e3 * median(ours_s):.2f} ms, max {1e3 * max(ours_s):.2f} ms"
        f" ({options.repeat} each, in turn)"
    )
    return result


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20, help="alternations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    raise SystemExit(main())
