"""Measures what exact mode, seals and a loss cost at real sizes, against fast mode in the same run.

python -m benchmarks.size [--parameters 57 200] [--repeat 3] [--json FILE]

Four workers of examples/train_gpt.py (hidden size 768, sequence 128, 8 micro-batches, the bucket
size of Megatron-Core) lose one of them, in exact and in fast mode in turn; a row of figures for
each size, in millions of parameters. Then one of two workers with a gigabyte of state each dies.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, run_benchmark
from benchmarks.size_probe import BANDWIDTH_EVENT, STEP_EVENT
from elaswave_plugin.core.step.dataflow import deal
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.run import Record, RunFiles, counted_steps, read_run

PROBE = Path(__file__).with_name("size_probe.py")
RUN_LIMIT_S = 1800.0
WORKERS, VICTIM, MICROBATCHES = 4, 2, 8
HIDDEN, SEQUENCE, BUCKET_ELEMENTS = 768, 128, 40_000_000
# One layer has 7.1 million parameters, and the vocabulary is one of bytes.
LAYERS = {57: 8, 200: 28}
# The first steps of a layout touch memory for the first time.
FIRST, LOSS, AFTER, STEPS = 2, 6, 9, 13
GIGABYTE_LAYERS, GIGABYTE_STEPS, GIGABYTE_LOSS = 28, 4, 2
MODES = ("exact", "fast")
# In the phase before the update the last seal is complete; at the begin of a step it is not yet.
SEALED, UNSEALED = "reduce", "data"

Runs = dict[str, list[RunFiles]]


def run_once(
    running: Bench, name: str, *, layers: int, workers: int, steps: int, mode: str, kill: str
) -> RunFiles:
    """Run a job with one loss, and read what it left; raises JobFailed."""
    directory = running.folder / name
    command = jobs.job_command(
        replace(running.options, steps=steps),
        socket_path=running.socket_path,
        data=running.folder / "data" / "text",
        directory=directory,
    )
    command[command.index("--nproc-per-node") + 1] = str(workers)
    place = command.index(str(running.options.script))
    command[place:place] = [str(PROBE), str(steps)]
    command += [
        *("--num-layers", str(layers), "--hidden-size", str(HIDDEN)),
        *("--num-attention-heads", "12", "--seq-length", str(SEQUENCE)),
        *("--global-batch-size", str(MICROBATCHES), "--ddp-bucket-size", str(BUCKET_ELEMENTS)),
        *("--elaswave-consistency", mode, "--elaswave-dump-state", "never"),
        *("--elaswave-kill", kill),
    ]
    jobs.run_job(command, f"run {name}", running.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
    return read_run(directory)


def step_times_s(runs: Iterable[RunFiles], first: int, last: int) -> list[float]:
    """The seconds of the steps from ``first`` on before ``last``, of each one's slowest worker."""
    return [
        max(float(record["step_s"]) for record in records)
        for run in runs
        for step, records in counted_steps(run).items()
        if first <= step < last
    ]


def redone_times_s(runs: Iterable[RunFiles]) -> list[float]:
    """The seconds of the redone step of each run, of its slowest survivor."""
    return [
        max(float(one["phases_s"]["replay"]) for one in run.of_kind("recovered")) for run in runs
    ]


def visible_to_replay_s(run: RunFiles) -> float:
    """From the event of the death to the begin of the redone step, of the last survivor."""
    seen_s = min(one["time_s"] for one in run.of_kind("worker_exited") if one["slot"] == VICTIM)
    begun_s = max(one["rung_at_s"] + one["pause_s"] for one in run.of_kind("recovered"))
    return float(begun_s - seen_s)


def bandwidth_term_s(run: RunFiles, parameters: int) -> float:
    """The time that the weights of the new layout take at this run's plain bandwidths.

    Every survivor reads and checks its share, gathers all of them, and hashes all of them.
    """
    width = WORKERS - 1
    terms = [
        4 * parameters / width * (1 / one["copy"] + 1 / one["hash"])
        + 4 * parameters * (1 / one["gather"] + 1 / one["hash"])
        for one in run.of_kind(BANDWIDTH_EVENT)
    ]
    return float(max(terms))


def steps_of(runs: Iterable[RunFiles], first: int, last: int) -> list[Record]:
    """The probe's notes of these steps."""
    return [one for run in runs for one in run.of_kind(STEP_EVENT) if first <= one["step"] < last]


def seal_over_memcpy(runs: Sequence[RunFiles]) -> float:
    """The processor time of a seal over that of a plain copy and hash of the same bytes."""
    seals = [one["training_thread_s"] + one["beside_s"] for one in steps_of(runs, AFTER, STEPS)]
    plain = [one["plain_s"] for run in runs for one in run.of_kind(BANDWIDTH_EVENT)]
    return float(sum(seals) / len(seals) / median(plain))


def extra_bytes_over_bucket(runs: Sequence[RunFiles], parameters: int) -> float:
    """The memory of a step after the loss beyond a healthy one's, by bucket and contribution.

    Without what a larger share of the state takes: moments, and two snapshots with the masters.
    """
    live = [slot for slot in range(WORKERS) if slot != VICTIM]
    flow = deal(num_microbatches=MICROBATCHES, launch_slots=range(WORKERS), live=live)
    state = (8 + 2 * 12) * parameters * (1 / len(live) - 1 / WORKERS)
    ratios = []
    for slot in live:
        before, after = (
            median(one["peak_bytes"] for one in steps_of(runs, *steps) if one["slot"] == slot)
            for steps in ((FIRST, LOSS), (AFTER, STEPS))
        )
        extra = (after - before - state) / (4 * BUCKET_ELEMENTS)
        ratios.append(extra / len(flow.contributions(slot)))
    return float(max(ratios))


def moved_over_ideal(run: RunFiles, parameters: int) -> float:
    """Bytes of state that changed workers, over those of the lost worker's share."""
    moved = int(run.of_kind("recovered")[0]["bytes_moved"])
    return moved / (12 * parameters / WORKERS)


def row_of(parameters: int, runs: Runs, unsealed: Sequence[RunFiles]) -> dict[str, Any]:
    """The figures of one size."""
    exact, fast = (runs[mode] for mode in MODES)
    ratios = {
        "healthy": [median(step_times_s(one, FIRST, LOSS)) for one in (exact, fast)],
        "after_loss": [median(step_times_s(one, AFTER, STEPS)) for one in (exact, fast)],
        "redone_step": [median(redone_times_s(one)) for one in (exact, fast)],
    }
    sealing = sum(one["training_thread_s"] for one in steps_of(exact, FIRST, LOSS))
    in_steps = WORKERS * sum(step_times_s(exact, FIRST, LOSS))
    return {
        "parameters": parameters,
        "exact_over_fast": {name: ours / theirs for name, (ours, theirs) in ratios.items()},
        "exact_s": {name: ours for name, (ours, _) in ratios.items()},
        "fast_s": {name: theirs for name, (_, theirs) in ratios.items()},
        "redone_before_the_seal_s": median(redone_times_s(unsealed)) if unsealed else None,
        "snapshot_share": sealing / in_steps,
        "seal_over_memcpy": seal_over_memcpy(exact),
        "extra_bytes_over_bucket": extra_bytes_over_bucket(exact, parameters),
        "visible_to_replay_s": median(visible_to_replay_s(run) for run in exact),
        "bandwidth_term_s": median(bandwidth_term_s(run, parameters) for run in exact),
        "moved_over_ideal": moved_over_ideal(exact[0], parameters),
    }


def bars_of(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The bars of a row: figure and limit, by name."""
    over = row["exact_over_fast"]
    return {
        "exact over fast, healthy": (over["healthy"], 1.05),
        "exact over fast, after a loss": (over["after_loss"], 1.15),
        "exact over fast, redone step": (over["redone_step"], 1.25),
        "seal over memcpy": (row["seal_over_memcpy"], 1.3),
        "training thread's share on seals": (row["snapshot_share"], 0.01),
        "extra bytes over bucket": (row["extra_bytes_over_bucket"], 2.0),
        "death visible to redone step, s": (
            row["visible_to_replay_s"],
            0.3 + row["bandwidth_term_s"],
        ),
    }


def measured_size(running: Bench, millions: int, repeat: int) -> dict[str, Any]:
    """All runs of one size, both modes in turn; prints and returns the row."""
    how = {"layers": LAYERS[millions], "workers": WORKERS, "steps": STEPS}
    runs: Runs = {mode: [] for mode in MODES}
    for number in range(repeat):
        for mode in MODES:
            name, kill = f"{millions}-{mode}-{number}", f"{VICTIM}@{LOSS}:{SEALED}"
            runs[mode].append(run_once(running, name, mode=mode, kill=kill, **how))
    early = f"{VICTIM}@{LOSS}:{UNSEALED}"
    unsealed = [run_once(running, f"{millions}-early", mode="exact", kill=early, **how)]
    parameters = LAYERS[millions] * (12 * HIDDEN**2 + 13 * HIDDEN) + (384 + SEQUENCE + 2) * HIDDEN
    row = row_of(parameters, runs, unsealed)
    row["bars"] = {
        name: {"value": value, "limit": limit, "kept": value <= limit}
        for name, (value, limit) in bars_of(row).items()
    }
    for name, one in row["bars"].items():
        kept = "ok" if one["kept"] else "MISSED"
        print(f"{millions} M  {name}: {one['value']:.4f} of {one['limit']:.4f}: {kept}", flush=True)
    print(f"{millions} M  moved over the lost share: {row['moved_over_ideal']:.2f}", flush=True)
    return row


def gigabyte(running: Bench) -> dict[str, Any]:
    """Two workers with more than 1 GB of optimizer state each, of which one is killed."""
    run = run_once(
        running,
        "gigabyte",
        layers=GIGABYTE_LAYERS,
        workers=2,
        steps=GIGABYTE_STEPS,
        mode="exact",
        kill=f"1@{GIGABYTE_LOSS}:{SEALED}",
    )
    fired = len(run.of_kind("fault_fired")) == 1
    done = sorted(counted_steps(run)) == list(range(GIGABYTE_STEPS))
    shard = max(one["shard_bytes"] for one in run.of_kind(BANDWIDTH_EVENT)) // 2
    print(f"2 workers, {shard / 1e9:.2f} GB of state each: survived {fired and done}", flush=True)
    return {"state_bytes_a_worker": shard, "survived": fired and done}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all of it; raises ConfigurationError, JobFailed."""
    if options.repeat < 1:
        raise ConfigurationError(f"--repeat is {options.repeat}, wanted at least 1")
    result = {**circumstances("benchmarks.size"), "repeat": options.repeat}
    print(f"load average before: {result['load_average_before']}", flush=True)
    with bench(nproc=WORKERS, steps=STEPS) as running:
        rows = [measured_size(running, millions, options.repeat) for millions in options.parameters]
        return {**result, "rows": rows, "gigabyte": gigabyte(running)}


def is_good(result: dict[str, Any]) -> bool:
    """True if every bar is kept and the large job survived."""
    bars = [bar["kept"] for row in result["rows"] for bar in row["bars"].values()]
    return all(bars) and bool(result["gigabyte"]["survived"])


def main() -> int:
    """Read the options and measure; exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    sizes = tuple(LAYERS)
    parser.add_argument(
        "--parameters", type=int, nargs="+", choices=sizes, default=sizes, help="millions of them"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each mode")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file, good=is_good)


if __name__ == "__main__":
    raise SystemExit(main())
