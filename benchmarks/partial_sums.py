"""Measures what copies of the gradient sums at each micro-batch boundary cost, in ZeRO 2 and 3.

python -m benchmarks.partial_sums [--stages 2 3] [--parts 8] [--steps 120] [--repeat 3]
    [--json FILE]

There a worker's shard of the sums is lost with it: to go on from them after a loss, each worker
would copy its shard behind each micro-batch but the last one, to where it outlives the worker. In
blocks of ten steps in turn two workers of examples/train_deepspeed.py do: a copy into shared
memory, and its checksum, which is the least that it takes (no message to another node). A loss at
any moment of a step has half of its passes run again; of ``--parts`` micro-batches, half of one
with such copies. What is saved so is told beside the cost.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.alternate import COPIED, PARTIAL_SUMS
from benchmarks.circumstances import circumstances
from benchmarks.measurement import RUN_LIMIT_S, run_benchmark
from benchmarks.overhead import PROCESSES, comparison, cpu_times_s, pooled, show
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.blocks import BLOCK_STEPS, is_measured, step_times_s
from elaswave_plugin.observer.run import read_run

HERE = Path(__file__).resolve()
ALTERNATE = HERE.with_name("alternate.py")
SCRIPT = HERE.parents[1] / "examples" / "train_deepspeed.py"
WORKERS, MICRO_BATCH = 2, 4


def configuration(stage: int, parts: int) -> dict[str, Any]:
    """Of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "elaswave": {"enabled": True},
    }


def run_once(stage: int, options: argparse.Namespace, folder: Path) -> Path:
    """Run a job; returns its run directory; raises JobFailed."""
    folder.mkdir()
    config, directory = folder / "deepspeed.json", folder / "run"
    config.write_text(json.dumps(configuration(stage, options.parts)))
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "run", f"--dir={directory}"]
    command += [f"--nproc-per-node={WORKERS}", str(ALTERNATE), PARTIAL_SUMS, str(SCRIPT)]
    command += [f"--deepspeed_config={config}", f"--steps={options.steps}", "--seq-length=128"]
    command += [f"--hidden-size={options.hidden_size}", f"--num-layers={options.num_layers}"]
    jobs.run_job(command, f"ZeRO {stage}", folder / "log", limit_s=RUN_LIMIT_S)
    return directory


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the jobs, the stages in turn; raises ConfigurationError, JobFailed."""
    if options.steps < 2 * BLOCK_STEPS:
        raise ConfigurationError(
            f"--steps is {options.steps}, wanted at least {2 * BLOCK_STEPS}: a block on, one off"
        )
    if options.parts < 2:
        raise ConfigurationError(f"--parts is {options.parts}, wanted at least 2 micro-batches")
    result = {**circumstances("benchmarks.partial_sums"), "parts": options.parts}
    print(f"load average before: {result['load_average_before']}", flush=True)
    result["saved_of_a_redone_step"] = (options.parts - 1) / options.parts / 2
    runs: dict[int, list[Any]] = {stage: [] for stage in options.stages}
    copies: dict[int, list[Any]] = {stage: [] for stage in options.stages}
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as name:
        for number in range(options.repeat):
            for stage in options.stages:
                run = read_run(run_once(stage, options, Path(name) / f"{number}-{stage}"))
                cpu = {process: cpu_times_s(run, process) for process in PROCESSES}
                runs[stage].append((step_times_s(run), cpu))
                copies[stage] += [one for one in run.of_kind(COPIED) if is_measured(one["step"])]
                show(f"ZeRO {stage}", comparison(*runs[stage][-1]))
    for stage, found in runs.items():
        each = [comparison(*one) for one in found]
        cpu = {process: pooled(one[process] for _, one in found) for process in PROCESSES}
        overall = comparison(pooled(one for one, _ in found), cpu)
        copies_s = sum(one["seconds"] for one in copies[stage]) / overall["on"]["steps"]
        ratios = sorted(one["ratio_of_cpu_s"] for one in each)
        result[f"zero_{stage}"] = {
            "repeats": each,
            "overall": overall,
            "elements": copies[stage][0]["elements"],
            "copies_cpu_s": copies_s,
            "share_of_a_step": copies_s / (overall["on"]["cpu_s"] - copies_s),
        }
        show(f"ZeRO {stage}", overall)
        print(
            f"ZeRO {stage}: copies of {copies[stage][0]['elements']} elements a worker take"
            f" {1e3 * copies_s:.2f} ms of a step's processor time,"
            f" {result[f'zero_{stage}']['share_of_a_step']:.4f} of it; on over off in"
            f" {len(ratios)} jobs {ratios[0]:.4f} to {ratios[-1]:.4f}; a redone step would save"
            f" {result['saved_of_a_redone_step']:.2f} of its passes"
        )
    return result


def main(argv: Sequence[str]) -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 3), default=[2, 3])
    parser.add_argument("--parts", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=120, help="of a job")
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each stage")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    options = parser.parse_args(argv)
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
