"""Times a step after losses: ours against rerouting and dropping replicas.

Small shapes in real processes, and all shapes through the planner's own step simulation, each
marked as what it is. Every row has the live share, rho and Gmax beside it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import command, measured_throughput, simulated_throughput
from benchmarks.circumstances import circumstances
from benchmarks.scenarios import Scenario, chosen, judged, scenarios
from benchmarks.throughput_report import draw, show_bars, show_row
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.output_file import check_output, check_picture

MEASURED, SIMULATED = "measured", "simulated"
# What ends in minutes: the others are asked for by name.
USUAL = ("pp2dp2-m8-one-1", "pp4dp4-m8-one-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """The scenarios to measure and those to simulate; ``layer_ms``: forward of a layer.

    ``with_split``: true if split backwards are measured too; they are always simulated.
    """

    measured: tuple[Scenario, ...]
    simulated: tuple[Scenario, ...]
    rounds: int
    layer_ms: float
    with_split: bool


def check_options(
    *,
    scenario: list[str],
    rounds: int,
    layer_ms: float,
    only: str | None,
    split_backward: bool,
    json_file: Path | None,
    plot: Path | None,
) -> ThroughputOptions:
    """Read the command's options. Raises ConfigurationError, before anything takes time."""
    if only not in (None, MEASURED, SIMULATED):
        raise ConfigurationError(f"--only is {only!r}, wanted {MEASURED} or {SIMULATED}")
    if rounds < 1:
        raise ConfigurationError(f"--rounds is {rounds}, wanted 1 or more")
    if not 0 < layer_ms < math.inf:
        raise ConfigurationError(f"--layer-ms is {layer_ms:g}, wanted a number above 0")
    if split_backward and only == SIMULATED:
        raise ConfigurationError(
            f"--split-backward is given with --only {SIMULATED}, which has them; leave it out"
        )
    check_output("--json", json_file)
    check_picture("--plot", plot)
    named = chosen(scenario)
    small = [one for one in named or chosen(list(USUAL)) if one.is_small]
    if only == MEASURED and named and len(small) < len(named):
        big = next(one for one in named if not one.is_small)
        raise ConfigurationError(
            f"--scenario is {big.name!r}, whose {big.pp * big.dp} workers are only simulated;"
            f" leave out --only {MEASURED}"
        )
    return ThroughputOptions(
        measured=() if only == SIMULATED else tuple(small),
        simulated=() if only == MEASURED else tuple(named or scenarios().values()),
        rounds=rounds,
        layer_ms=layer_ms,
        with_split=split_backward,
    )


def measure(
    options: ThroughputOptions, tell: Callable[[str], None], show: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Simulate, then measure; ``show`` gets each row, ``tell`` what goes on. Raises JobFailed."""
    result = {
        **circumstances(),
        "layer_ms": options.layer_ms,
        "emulated": "of measured rows, the compute of layers is asleep; the rest is real",
        "model": f"of simulated rows: {simulated_throughput.MODEL}",
    }
    simulated, measured = [], []
    if options.simulated:
        tell(f"{len(options.simulated)} scenarios are simulated")
    for one in options.simulated:
        for row in simulated_throughput.rows_of(one):
            simulated.append(row)
            show(row)
    if options.measured:
        with measured_throughput.opened(options.layer_ms) as jobs:
            for one in options.measured:
                row = measured_throughput.row_of(
                    jobs, one, rounds=options.rounds, with_split=options.with_split, tell=tell
                )
                measured.append(row)
                show(row)
    return {
        **result,
        "measured": {"bars": judged(measured), "rows": measured},
        "simulated": {"bars": judged(simulated), "rows": simulated},
    }


def is_good(result: dict[str, Any]) -> bool:
    """Return whether every bar holds."""
    return all(bar["holds"] for kind in (MEASURED, SIMULATED) for bar in result[kind]["bars"])


def throughput(
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Such as pp4dp4-m16-one-2; may be repeated."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each scenario is measured.")] = 1,
    layer_ms: Annotated[float, typer.Option(help="Forward pass of a layer, spent asleep.")] = 20.0,
    only: Annotated[
        str | None,
        typer.Option(metavar="measured|simulated", help="One of the two.", show_default="both"),
    ] = None,
    split_backward: Annotated[
        bool, typer.Option("--split-backward", help="Measure split backwards as well.")
    ] = False,
    json_file: command.JsonFile = None,
    plot: command.Picture = None,
) -> int:
    """Time a step after losses: ours, rerouting only, dropping replicas; real and simulated."""
    options = check_options(
        scenario=scenario or [],
        rounds=rounds,
        layer_ms=layer_ms,
        only=only,
        split_backward=split_backward,
        json_file=json_file,
        plot=plot,
    )
    result = measure(options, command.tell, lambda row: show_row(row, typer.echo))
    show_bars(result, typer.echo)
    command.write(result, json_file)
    if plot is not None:
        draw(result, plot)
    return 0 if is_good(result) else 1


def main(argv: Sequence[str]) -> int:
    """Measure as the command line says."""
    return command.run(throughput, "throughput", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
