"""Random sequences of faults on real jobs, drawn from seeds.

python -m tests.chaos --seed N --runs K [--job NAME]   dp, hybrid, zygote, zero1, zero2, zero3,
                                                       deepspeed-pipeline

Seeds N to N+K-1 of each kind of job. What fails is printed with its command; exit code 1. A run of
all kinds writes its result file, benchmarks/chaos.json.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.chaos.draws import draw, kinds
from tests.chaos.runs import LIMIT_S, Played, Stage
from tests.chaos.verdict import judge, judge_by_twin
from tests.deepspeed.harness import PRELOAD as ENGINE_PRELOAD
from tests.faults.harness import PRELOAD, ROOT, Zygote
from tests.faults.matrix import write_text

RESULT = ROOT / "benchmarks" / "chaos.json"
_STUCK = f"it has not ended within {LIMIT_S:g} s, nor by SIGTERM"


@contextmanager
def open_stage(name: str, folder: Path) -> Iterator[Stage]:
    """Open the stage on which the scenarios of one kind of job run."""
    is_megatron = name in ("dp", "hybrid", "zygote")
    folder.mkdir(parents=True)
    if is_megatron:
        write_text(folder / "data")
    zygote = Zygote(folder, PRELOAD if is_megatron else ENGINE_PRELOAD)
    try:
        yield Stage(zygote, data=folder / "data", folder=folder)
    finally:
        zygote.close()


def run_seed(stage: Stage, name: str, seed: int) -> dict[str, Any]:
    """Draw, run and judge a scenario; return its row of the result file."""
    scenario = draw(name, seed)
    print(f"{name} seed {seed}: {scenario}", flush=True)
    reference = stage.reference(scenario.spec)
    row: dict[str, Any] = {"job": name, "seed": seed, "events": list(map(str, scenario.events))}
    try:
        played = stage.play(scenario)
    except subprocess.TimeoutExpired as error:
        # What failed before the end of the processes was waited for, which is the harness itself.
        why = f"{_STUCK} ({error.__context__!r} before)" if error.__context__ else _STUCK
        print(f"{name} seed {seed}: FAILED: {why}; again: {again(name, seed)}", flush=True)
        return {**row, "seconds": LIMIT_S, "failure": why}
    seconds = row["seconds"] = round(played.outcome.seconds, 1)
    try:
        judge(played, reference)
        twin = stage.twin(played)
        judge_by_twin(played, twin)
    except AssertionError as error:
        show(played)
        print(f"{name} seed {seed}: FAILED: {error}", flush=True)
        print(f"  its files: {played.outcome.directory}; again: {again(name, seed)}", flush=True)
        return {**row, "failure": str(error) or "an assertion failed"}
    show(played)
    beside = "" if twin is None else f", as its twin {' '.join(twin.spec.changes)}"
    print(f"{name} seed {seed}: passed{beside} in {seconds} s", flush=True)
    shutil.rmtree(played.outcome.directory)
    return {**row, "failure": None}


def show(played: Played) -> None:
    """Print what happened to whom."""
    for event in read_lines(played.outcome.directory / EVENTS_FILE):
        if event["kind"] == "fault_fired":
            where = f"worker {event['slot']}.{event['incarnation']} of {event['width']}"
            print(f"  happened: {event['number']} {event['how']}, {where}, step {event['step']}")


def again(name: str, seed: int) -> str:
    """The command that runs one seed."""
    return f"python -m tests.chaos --job {name} --seed {seed}"


def main() -> int:
    """Run the seeds; exit code 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--runs", type=int, default=1, help="so many seeds")
    parser.add_argument("--job", choices=[*kinds()], help="one kind of job")
    parser.add_argument("--out", type=Path, help="new folder in which the files of failures stay")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="elaswave-chaos-"))
    rows, head = [], circumstances("tests.chaos")
    for name in [options.job] if options.job else kinds():
        with open_stage(name, out / name) as stage:
            for seed in range(options.seed, options.seed + options.runs):
                rows.append(run_seed(stage, name, seed))
    failed = [again(row["job"], row["seed"]) for row in rows if row["failure"] is not None]
    if not options.job:
        result = {**head, "runs": len(rows), "passed": len(rows) - len(failed), "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        print("\n".join(["failed:", *failed]))
        return 1
    shutil.rmtree(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
