"""The full fault matrix: every slot x every phase x options, run and written to a result file.

python -m tests.faults.matrix [--out FILE]
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from elaswave_plugin.demo.text import find_text, write_dataset
from elaswave_plugin.observer import recoveries_of
from tests.faults.harness import ROOT, JobSpec, Outcome, Zygote, check_equal, launch

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
RECOVERY_PHASES = ("detect", "agree", "edit", "move", "rebind", "verify", "replay")
OPTIONS = (
    (),
    ("--calculate-per-token-loss",),
    ("--recompute-granularity=full",),
    ("--bf16", "--calculate-per-token-loss"),
    ("--no-overlap-grad-reduce",),
)
SLOTS = range(4)


def cases() -> list[JobSpec]:
    """Every case of the matrix, in order."""
    single = [
        JobSpec(kills=(f"{slot}@{1 + (slot + index) % 4}:{phase}",), options=OPTIONS[slot])
        for slot, (index, phase) in itertools.product(SLOTS, enumerate(STEP_PHASES))
    ]
    plain = [
        JobSpec(kills=(f"{slot}@3:{phase}",))
        for slot, phase in itertools.product(SLOTS, STEP_PHASES)
    ]
    pairs = [
        JobSpec(kills=(f"{first}@2:{phase}", f"{second}@2:{other}"))
        for (first, second), (phase, other) in zip(
            itertools.permutations(SLOTS, 2),
            itertools.cycle(itertools.permutations(STEP_PHASES, 2)),
            strict=False,
        )
    ]
    during = [
        JobSpec(kills=(f"{first}@3:backward", f"{(first + 1) % 4}@3:{phase}"))
        for first, phase in itertools.product((0, 2), RECOVERY_PHASES)
    ]
    outside = [
        JobSpec(options=("--eval-interval=2",), kills=(f"{slot}@4:evaluation",)) for slot in SLOTS
    ]
    wide = [
        JobSpec(nproc=8, steps=4, kills=(f"{first}@1:{phase}", f"{7 - first}@2:{phase}"))
        for first, phase in zip(range(4), STEP_PHASES, strict=False)
    ]
    return [*plain, *single, *pairs, *during, *outside, *wide]


def row_of(spec: JobSpec, run: Outcome, reference: Outcome) -> dict[str, Any]:
    """One line of the result file."""
    failure = None
    try:
        check_equal(run, reference)
    except AssertionError as error:
        failure = str(error).splitlines()[0][:300]
    recoveries = recoveries_of(run.files) if run.returncode == 0 else []
    return {
        "nproc": spec.nproc,
        "kills": list(spec.kills),
        "options": list(spec.options),
        "passed": failure is None,
        "failure": failure,
        "mttr_s": [round(one["mttr_s"], 4) for one in recoveries],
        "seconds": round(run.seconds, 2),
    }


def main() -> int:
    """Run the matrix; exit code 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "fault_matrix.json")
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    references: dict[JobSpec, Outcome] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_dataset(
            find_text(Path(sysconfig.get_path("stdlib")) / "json"), folder / "data" / "text"
        )
        zygote = Zygote(folder)
        try:
            for index, spec in enumerate(all_cases := cases()):
                undisturbed = replace(spec, kills=())
                if undisturbed not in references:
                    references[undisturbed] = launch(
                        undisturbed,
                        zygote=zygote,
                        data=folder / "data",
                        directory=folder / f"reference-{len(references)}",
                    )
                run = launch(
                    spec, zygote=zygote, data=folder / "data", directory=folder / f"run-{index}"
                )
                rows.append(row_of(spec, run, references[undisturbed]))
                verdict = "ok" if rows[-1]["passed"] else f"FAILED {rows[-1]['failure']}"
                print(
                    f"{index + 1:3d}/{len(all_cases)} {' '.join(spec.kills)} "
                    f"{' '.join(spec.options)}: {verdict}",
                    flush=True,
                )
        finally:
            zygote.close()
    write_result(out, rows)
    return 0 if all(row["passed"] for row in rows) else 1


def write_result(out: Path, rows: list[dict[str, Any]]) -> None:
    """The result file: what was run where, and every case."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    times = [time_s for row in rows for time_s in row["mttr_s"]]
    result = {
        "command": "make matrix",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "cases": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "mttr_s": {"median": round(median(times), 4), "max": round(max(times), 4)},
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['passed']} of {result['cases']} cases passed; {out.name} written")


if __name__ == "__main__":
    raise SystemExit(main())
