"""Times what a loss costs the groups: by rebuilding them, and by editing them.

A real agent, trainers and agreement on one machine. The three ways are measured in one run, in
the same processes, with the same groups and the same victim; each figure is the slowest survivor's.
Each begins when every survivor is ready. Gloo's rebuilds are told nothing about the victim; ours
begins when the victim says that it leaves, and contains the agreement. Groups
are verified once every survivor has made its own: the first would slow the others down.
"""

import json
import math
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import command
from benchmarks.circumstances import circumstances
from benchmarks.communicator_report import draw, show
from benchmarks.group_list import Layout, default_layout, parse_layout
from benchmarks.message_waves import floor_ms
from elaswave_plugin.demo.jobs import run_job, running, wait_until_ready
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.output_file import check_output, check_picture

HERE = Path(__file__).parent
WORKERS = ("rebuild_worker", "latency_worker", "migration_worker")
JOB_LIMIT_S = 240.0
LATENCY_WORLDS = (4, 8)
LATENCY_RUNS = 30
KILL_WORLD = 8
FLOOR_ROUNDS = 30
RESOURCES = ("descriptors", "threads", "private_bytes")

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorOptions:
    """The runs to measure: world sizes with their layouts, losses a size, kills at 8 workers.

    ``per_node``: workers of each node of such a job, all nodes being on this machine.
    """

    layouts: tuple[Layout, ...]
    runs: int
    kills: int
    per_node: int


def check_options(
    *,
    world: str,
    layout: str | None,
    runs: int,
    kills: int,
    json_file: Path | None,
    plot: Path | None,
    per_node: int = 8,
) -> CommunicatorOptions:
    """Read the command's options. Raises ConfigurationError."""
    try:
        worlds = tuple(map(int, world.split(",")))
    except ValueError:
        raise ConfigurationError(f"--world is {world!r}, wanted sizes such as 8,16,32") from None
    if not 1 <= runs <= 20 or kills < 0:
        raise ConfigurationError(f"--runs is {runs} and --kills {kills}, wanted 1..20 and >= 0")
    check_output("--json", json_file)
    check_picture("--plot", plot)
    layouts = tuple(
        default_layout(w) if layout is None else parse_layout(layout, w) for w in worlds
    )
    for one in layouts:
        if one.world - runs < 3:
            raise ConfigurationError(
                f"--runs is {runs}, which leaves too few of {one.world} workers"
            )
    if per_node < 1 or any(one > per_node and one % per_node for one in worlds):
        raise ConfigurationError(
            f"--per-node is {per_node}, wanted a divisor of each of the sizes {world}"
        )
    return CommunicatorOptions(layouts=layouts, runs=runs, kills=kills, per_node=per_node)


class Bench:
    """Starts the jobs of the benchmark and reads their figures."""

    def __init__(self, folder: Path, zygote: Path, store_port: int, per_node: int) -> None:
        self._per_node = per_node
        self._folder = folder
        self._zygote = zygote
        self._store_port = store_port
        self._jobs = 0

    def run(self, script: str, world: int, *arguments: str) -> Rows:
        """Run a worker script in a job; every line of figures that it wrote."""
        self._jobs += 1
        out = self._folder / str(self._jobs)
        out.mkdir()
        width = min(world, self._per_node)
        nodes, port = world // width, _free_port()
        command = [sys.executable, "-m", "elaswave_plugin.cli.main", "run"]
        command += [f"--nproc-per-node={width}", f"--nnodes={nodes}", f"--master-port={port}"]
        command += [f"--zygote={self._zygote}", f"--dir={out}"]
        program = [str(HERE / script), str(out), str(self._store_port), *arguments]
        with ExitStack() as others:
            for node in range(1, nodes):
                others.enter_context(
                    running([*command, f"--node-rank={node}", *program], out / f"log-{node}")
                )
            first = [*command, "--node-rank=0", *program]
            run_job(first, f"{script} with {world} workers", out / "log", limit_s=JOB_LIMIT_S)
        files = [path for path in out.glob("*.jsonl") if path.stem.isdigit()]
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def departures(self, layout: Layout, runs: int) -> dict[str, Any]:
        """The row of one world size."""
        sizes = f"{layout.tp},{layout.pp},{layout.dp}"
        rows = self.run("rebuild_worker.py", layout.world, "departures", str(runs), sizes)
        left_s = {row["slot"]: row["at_s"] for row in rows if row["what"] == "leaves"}
        made: dict[str, list[float]] = {"full": [], "partial": [], "edit": []}
        verified: dict[str, list[float]] = {"full": [], "partial": [], "edit": []}
        for run in range(runs):
            for way in ("full", "partial", "edit"):
                here = [row for row in rows if row["what"] == way and row.get("run") == run]
                if way == "edit":
                    took_s = max(r["made_at_s"] for r in here) - left_s[here[0]["victim"]]
                else:
                    took_s = max(row["made_s"] for row in here)
                made[way].append(1e3 * took_s)
                verified[way].append(1e3 * (took_s + max(row["verify_s"] for row in here)))
        typical = {way: median(values) for way, values in made.items()}
        return {
            "world": layout.world,
            "layout": str(layout),
            "runs": runs,
            **{f"{way}_ms": value for way, value in typical.items()},
            "p99_ms": {way: percentile(values, 0.99) for way, values in made.items()},
            "verified_ms": {way: median(values) for way, values in verified.items()},
            "per_node": min(layout.world, self._per_node),
            # The processor time of a typical worker, all its threads together.
            "busy_ms": 1e3 * median(row["busy_s"] for row in rows if row["what"] == "edit"),
            "floor_ms": floor_ms(layout.world, self._per_node, FLOOR_ROUNDS),
            "ratio_full": typical["full"] / typical["edit"],
            "ratio_partial": typical["partial"] / typical["edit"],
            "resources": {
                engine: _resources(rows, f"{engine} resources") for engine in ("gloo", "elastic")
            },
        }

    def latencies(self, world: int) -> Rows:
        """A row for each collective and size."""
        rows = self.run("latency_worker.py", world, str(LATENCY_RUNS))
        found: Rows = []
        for key in dict.fromkeys((row["op"], row["bytes"]) for row in rows if "op" in row):
            here = [row for row in rows if (row.get("op"), row.get("bytes")) == key]
            # The slowest worker of each repetition, then the median.
            slowest = {
                engine: median(map(max, zip(*(row[f"{engine}_s"] for row in here), strict=True)))
                for engine in ("ours", "gloo")
            }
            figures = {f"{engine}_ms": 1e3 * value for engine, value in slowest.items()}
            found.append({"op": key[0], "world": world, "bytes": key[1], **figures})
        return found

    def kill_to_verified_ms(self, layout: Layout) -> float:
        """SIGKILL in the middle of an all-reduce, to the last survivor's last verified group."""
        sizes = f"{layout.tp},{layout.pp},{layout.dp}"
        rows = self.run("rebuild_worker.py", layout.world, "kill", "1", sizes)
        (killed,) = (row for row in rows if row["what"] == "killed")
        done = [row["at_s"] for row in rows if row["what"] == "verified"]
        if len(done) != layout.world - 1 or not killed["in_flight"]:
            raise RuntimeError(f"{len(done)} survivors, in flight: {killed['in_flight']}")
        return float(1e3 * (max(done) - killed["at_s"]))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _resources(rows: Rows, what: str) -> dict[str, int]:
    """The most that any worker needed for its groups."""
    here = [row for row in rows if row["what"] == what and row["run"] == 0]
    return {key: max(row["after"][key] - row["before"][key] for row in here) for key in RESOURCES}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@contextmanager
def opened(per_node: int = 8) -> Iterator[Bench]:
    """A zygote and a store that serve every job, in a folder that goes away."""
    from torch import distributed

    c10d: Any = distributed
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as name:
        folder = Path(name)
        log = folder / "zygote.log"
        command = [sys.executable, "-W", "ignore", "-m", "elaswave_plugin.trainer.zygote"]
        preload = ",".join(["torch", "psutil", *(f"benchmarks.{w}" for w in WORKERS)])
        with running(
            [*command, f"--socket={folder / 'z'}", f"--preload={preload}"], log
        ) as process:
            wait_until_ready(process, folder / "z", log)
            store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            yield Bench(folder, folder / "z", store.port, per_node)


def measure(options: CommunicatorOptions, tell: Any) -> dict[str, Any]:
    """Measure everything; `tell(text)` hears what is going on. Raises JobFailed."""
    result: dict[str, Any] = {
        **circumstances(),
        "rows": [],
        "collectives": [],
        "kill_to_verified_ms": [],
    }
    with opened(options.per_node) as bench:
        for layout in options.layouts:
            tell(f"{layout.world} workers, TP x PP x DP = {layout}: {options.runs} losses")
            result["rows"].append(bench.departures(layout, options.runs))
        for world in LATENCY_WORLDS:
            tell(f"collectives of {world} workers")
            result["collectives"] += bench.latencies(world)
        for number in range(options.kills):
            tell(f"SIGKILL {number + 1} of {options.kills}")
            layout = default_layout(KILL_WORLD)
            result["kill_to_verified_ms"].append(bench.kill_to_verified_ms(layout))
    return result


def communicator(
    world: Annotated[str, typer.Option(help="Numbers of workers.")] = "8,16,32,64",
    layout: Annotated[
        str | None, typer.Option(metavar="TP,PP,DP", show_default="2,2,DP; 2,4,DP from 32 on")
    ] = None,
    per_node: Annotated[
        int, typer.Option(help="Workers of a node; all nodes are on this machine.")
    ] = 8,
    runs: Annotated[int, typer.Option(help="Losses a number of workers.")] = 5,
    kills: Annotated[int, typer.Option(help="SIGKILLs in an all-reduce of 8 workers.")] = 30,
    json_file: command.JsonFile = None,
    plot: command.Picture = None,
) -> int:
    """Time the loss of a worker: all groups rebuilt, some rebuilt, all edited in place."""
    options = check_options(
        world=world,
        layout=layout,
        runs=runs,
        kills=kills,
        json_file=json_file,
        plot=plot,
        per_node=per_node,
    )
    result = measure(options, command.tell)
    show(result, Console())
    command.write(result, json_file)
    if plot is not None:
        draw(result, plot)
    return 0


def main(argv: Sequence[str]) -> int:
    """Measure as the command line says."""
    return command.run(communicator, "communicator", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
