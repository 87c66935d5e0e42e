"""The cost of seeing what the loop's body changes: digests of the weights, twice a step.

python -m benchmarks.step_digest [--parameters 900000,57000000] [--repeat 20] [--json FILE]

One data-parallel worker, in float32. A plain copy of the weights is timed in turn with the digests.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.circumstances import circumstances
from benchmarks.measurement import run_benchmark
from benchmarks.overhead import percentile_s
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.step_state.step_state import digest_of

BUCKETS = 8


def timed_s(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def row_of(parameters: int, repeat: int) -> dict[str, Any]:
    """The figures of one size."""
    weights = [torch.rand(parameters // BUCKETS) for _ in range(BUCKETS)]
    digests_s, copy_s = [], []
    for _ in range(repeat):
        # Once where a step is sealed, once where the next one begins.
        digests_s.append(timed_s(lambda: [digest_of(one) for one in 2 * weights]))
        copy_s.append(timed_s(lambda: [one.clone() for one in weights]))
    return {
        "parameters": parameters,
        "digests_median_s": median(digests_s),
        "digests_p99_s": percentile_s(digests_s, 0.99),
        "copy_of_weights_median_s": median(copy_s),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time each size; raises ConfigurationError."""
    sizes = [int(one) for one in options.parameters.split(",")]
    if options.repeat < 1 or min(sizes) < BUCKETS:
        raise ConfigurationError(
            f"--repeat is {options.repeat} and --parameters {options.parameters}, wanted at least 1"
            f" and {BUCKETS}"
        )
    result = {**circumstances("benchmarks.step_digest"), "repeat": options.repeat, "rows": []}
    for parameters in sizes:
        row = row_of(parameters, options.repeat)
        result["rows"].append(row)
        print(
            f"{parameters:12,} parameters  digests of a step: median"
            f" {1e3 * row['digests_median_s']:.2f} ms, p99 {1e3 * row['digests_p99_s']:.2f} ms;"
            f" a copy of the weights {1e3 * row['copy_of_weights_median_s']:.2f} ms"
        )
    return result


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="900000,57000000", help="sizes, with commas")
    parser.add_argument("--repeat", type=int, default=20, help="times in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    raise SystemExit(main())
