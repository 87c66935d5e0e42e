"""Times for how long training stands still when layers change stage.

A real agent, workers, snapshots and transfers on one machine; state of made-up values, which
are checked at every arrival. Three ways in turn, in the same processes: everything before training
goes on, with a stage's state in one buffer (contiguous) or with every layer cut by itself
(interleaved), and the weights first, with the optimizer state behind. The pause runs from the first
worker's begin to the last worker's gathered weights; nothing computes meanwhile.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import command
from benchmarks.circumstances import circumstances
from benchmarks.communicator import Rows, opened, percentile
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.output_file import check_output

WAYS = ("blocking_contiguous", "blocking_interleaved", "nonblocking_interleaved")
ALIGNMENT = 128


def check_options(
    *, dp: int, layers: int, layer_mib: int, moved: int, rounds: int, json_file: Path | None
) -> None:
    """Raises ConfigurationError for sizes that cannot be measured."""
    check_output("--json", json_file)
    sizes = {"--dp": dp, "--layer-mib": layer_mib, "--moved": moved, "--rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}, wanted 1 or more")
    if layers % 2 or not moved < layers // 2:
        raise ConfigurationError(
            f"--layers is {layers} and --moved {moved}, wanted an even number of layers, and fewer"
            " to move than half of them"
        )
    if (layer_mib << 18) % (dp * ALIGNMENT):
        raise ConfigurationError(
            f"--dp is {dp}, which does not divide a layer of {layer_mib} MiB evenly; wanted a power"
            " of two"
        )


def measure(
    *, dp: int, layers: int, layer_mib: int, moved: int, rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure; ``layer_mib``: fp32 weights of a layer. Raises JobFailed."""
    found = circumstances()
    tell(f"{2 * dp} workers, {layers} layers of {layer_mib} MiB of weights, {moved} of them move")
    with opened() as bench:
        sizes = (dp, layers, layer_mib << 18, moved, rounds)
        rows = bench.run("migration_worker.py", 2 * dp, *map(str, sizes))
    pauses = {way: [_span_s(rows, way, run, "paused_s") for run in range(rounds)] for way in WAYS}
    typical = {way: median(values) for way, values in pauses.items()}
    return {
        **found,
        "layout": f"PP2 x DP{dp}",
        "layers": layers,
        "moved": moved,
        "layer_state_bytes": 12 * (layer_mib << 18),
        "rounds": rounds,
        "pause_s": typical,
        "p99_s": {way: percentile(values, 0.99) for way, values in pauses.items()},
        "pauses_s": pauses,
        "ratio_to_blocking_contiguous": {way: typical[way] / typical[WAYS[0]] for way in WAYS},
        "behind_s": median(_span_s(rows, WAYS[2], run, "over_s") for run in range(rounds)),
        "fetched_bytes": {
            way: sum(row["fetched_bytes"] for row in _of(rows, way, 0)) for way in WAYS
        },
    }


def show(result: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print every figure."""
    for way in WAYS:
        pause, fetched = result["pause_s"][way], result["fetched_bytes"][way] / 2**20
        ratio = result["ratio_to_blocking_contiguous"][way]
        echo(f"{way:>24}: pause {1e3 * pause:7.1f} ms ({ratio:.2f}x), {fetched:.0f} MiB fetched")
    echo(f"{'all of it there after':>24}: {1e3 * result['behind_s']:.1f} ms")


def _of(rows: Rows, way: str, run: int) -> Rows:
    return [row for row in rows if row["what"] == way and row["run"] == run]


def _span_s(rows: Rows, way: str, run: int, until: str) -> float:
    """Return the seconds from the first worker's begin to the last worker's end."""
    here = _of(rows, way, run)
    return float(max(row[until] for row in here) - min(row["begun_s"] for row in here))


def migration(
    dp: Annotated[int, typer.Option(help="Workers of each of the two stages.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 12,
    layer_mib: Annotated[int, typer.Option(help="fp32 weights of a layer, MiB.")] = 8,
    moved: Annotated[int, typer.Option(help="Layers that change stage.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each way is measured.")] = 20,
    json_file: command.JsonFile = None,
) -> int:
    """Time the pause for moving layers: all before training goes on, or the weights first."""
    sizes = {"dp": dp, "layers": layers, "layer_mib": layer_mib, "moved": moved, "rounds": rounds}
    check_options(**sizes, json_file=json_file)
    result = measure(**sizes, tell=command.tell)
    show(result, typer.echo)
    command.write(result, json_file)
    return 0


def main(argv: Sequence[str]) -> int:
    """Measure as the command line says."""
    return command.run(migration, "migration", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
