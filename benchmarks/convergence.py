"""Compares the losses of a run that loses workers with those of the run that loses none.

python -m benchmarks.convergence [--steps 200] [--seeds 3] [--nproc 4] [--json FILE] [--plot FILE]

Two workers are lost, after a quarter and after a half of the steps. Draws are keyed, as in every
job, or are each worker's own (`drawn_by_worker.py`); dropout is on. The deviation of a run is the
mean, over the steps from the first loss on, of the distance between the two losses of a step.
Source: ElasWave, the claim that resharding the RNG lowers it by 78 %.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, options_parser, run_benchmark
from elaswave_plugin.config import Kill
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.observer import losses_of
from elaswave_plugin.observer.output_file import check_picture
from elaswave_plugin.observer.run import read_run

BY_WORKER = Path(__file__).with_name("drawn_by_worker.py")
WAYS = ("keyed", "by worker")
RUN_LIMIT_S = 1800.0
SEED = 1234


def losses(running: Bench, *, way: str, seed: int, kills: Sequence[Kill]) -> list[float]:
    """The loss of each step of one run; raises JobFailed."""
    name = f"{way.replace(' ', '-')}-{seed}-{len(kills)}"
    directory = running.folder / name
    command = jobs.job_command(
        replace(running.options, seed=seed, kills=tuple(kills)),
        socket_path=running.socket_path,
        data=running.folder / "data" / "text",
        directory=directory,
        kill=bool(kills),
    )
    if way == "by worker":
        command.insert(command.index(str(running.options.script)), str(BY_WORKER))
    jobs.run_job(command, f"run {name}", running.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
    run = read_run(directory)
    lost = sum(one["kind"] == "fault_fired" for one in run.events)
    if lost != len(kills):
        raise ConfigurationError(f"run {name} lost {lost} workers, wanted {len(kills)}")
    return [*losses_of(run).values()]


def row_of(
    undisturbed: Sequence[float], disturbed: Sequence[float], *, first: int
) -> dict[str, Any]:
    """Return how far the two are from each other, from step ``first`` on."""
    distances = [abs(a - b) for a, b in zip(undisturbed, disturbed, strict=True)][first:]
    return {
        "undisturbed": list(undisturbed),
        "disturbed": list(disturbed),
        "deviation": fmean(distances),
        "largest": max(distances),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all; raises ConfigurationError, JobFailed."""
    if options.steps < 8 or options.seeds < 1 or options.nproc < 3:
        raise ConfigurationError(
            f"--steps is {options.steps}, --seeds {options.seeds} and --nproc {options.nproc},"
            " wanted at least 8, 1 and 3"
        )
    check_picture("--plot", options.plot)
    first = options.steps // 4
    kills = [
        Kill(slot=options.nproc - 1, step=first, phase="backward"),
        Kill(slot=0, step=2 * first, phase="backward"),
    ]
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with bench(nproc=options.nproc, steps=options.steps) as running:
        for seed in range(SEED, SEED + options.seeds):
            for way in WAYS:
                whole, lost = (
                    losses(running, way=way, seed=seed, kills=some) for some in ([], kills)
                )
                row = {"seed": seed, **row_of(whole, lost, first=first)}
                rows[way].append(row)
                print(
                    f"seed {seed}, {way:9}: deviation {row['deviation']:.6f}, largest"
                    f" {row['largest']:.6f}, last loss {whole[-1]:.4f} and {lost[-1]:.4f}",
                    flush=True,
                )
    mean = {way: fmean(row["deviation"] for row in rows[way]) for way in WAYS}
    down = 1 - mean["keyed"] / mean["by worker"]
    print(
        f"deviation {mean['by worker']:.6f} by worker, {mean['keyed']:.6f} keyed: {down:.1%} less"
    )
    result = {
        **circumstances("benchmarks.convergence"),
        "workers": options.nproc,
        "steps": options.steps,
        "kills": [str(one) for one in kills],
        "deviation": mean,
        "less": down,
        "rows": rows,
    }
    if options.plot is not None:
        draw(result, options.plot)
    return result


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the distance of the first seed's losses by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for way in WAYS:
        row = result["rows"][way][0]
        pairs = zip(row["undisturbed"], row["disturbed"], strict=True)
        axes.plot([abs(a - b) for a, b in pairs], label=f"draws {way}", linewidth=1)
    for kill in result["kills"]:
        axes.axvline(int(kill.partition("@")[2].partition(":")[0]), color="grey", linewidth=0.5)
    axes.set(xlabel="step", ylabel="distance of the losses")
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)


def main() -> int:
    """Read the options and measure."""
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 1234 on")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    raise SystemExit(main())
