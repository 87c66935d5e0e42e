"""The full matrix of DeepSpeed: every ZeRO stage x dtype x slot x phase, against its twin.

python -m tests.deepspeed.matrix [--out FILE]
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from elaswave_plugin.config import parse_kill
from elaswave_plugin.observer import median_step_s, recoveries_of
from tests.deepspeed.harness import PRELOAD, EngineSpec, check_recovered
from tests.faults.harness import ROOT, Outcome, Zygote, launch

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
KILL_STEP = 3


def cases() -> list[EngineSpec]:
    """Every case of the matrix, in order."""
    return [
        EngineSpec(stage=stage, bf16=bf16, kills=(f"{slot}@{KILL_STEP}:{phase}",))
        for stage, bf16, slot, phase in itertools.product(
            (0, 1, 2, 3), (False, True), range(4), PHASES
        )
    ]


class Runs:
    """Launches of one matrix; each undisturbed run and each twin once."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._made: dict[EngineSpec, Outcome] = {}
        self._count = 0

    def run(self, spec: EngineSpec) -> Outcome:
        """Launch it."""
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        return launch(spec, zygote=self._zygote, data=folder, directory=folder)

    def once(self, spec: EngineSpec) -> Outcome:
        """Launch it where that has not been done."""
        if spec not in self._made:
            self._made[spec] = self.run(spec)
        return self._made[spec]

    def twin(self, spec: EngineSpec) -> Outcome:
        """The same workers leave as planned."""
        kills = [parse_kill(kill) for kill in spec.kills]
        changes = tuple(f"{kill.slot}@{kill.step}" for kill in kills)
        return self.once(replace(spec, kills=(), changes=changes))


def row_of(spec: EngineSpec, runs: Runs) -> dict[str, Any]:
    """Run one case; one line of the result file."""
    failure = None
    run = runs.run(spec)
    try:
        reference = runs.once(replace(spec, kills=()))
        check_recovered(run, twin=runs.twin(spec), reference=reference)
    except AssertionError as error:
        failure = str(error).splitlines()[0][:300]
    after_s = median_step_s(run.files)["after"] if failure is None else None
    return {
        "stage": spec.stage,
        "bf16": spec.bf16,
        "kills": list(spec.kills),
        "passed": failure is None,
        "failure": failure,
        "mttr_s": [round(one["mttr_s"], 4) for one in recoveries_of(run.files)],
        "median_step_after_s": after_s,
        "seconds": round(run.seconds, 2),
    }


def main() -> int:
    """Run the matrix; exit code 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "deepspeed_matrix.json")
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        zygote = Zygote(Path(folder), PRELOAD)
        runs = Runs(zygote, Path(folder))
        try:
            for index, spec in enumerate(all_cases := cases()):
                rows.append(row_of(spec, runs))
                row = rows[-1]
                verdict = f"ok {row['mttr_s']}" if row["passed"] else f"FAILED {row['failure']}"
                name = f"zero{spec.stage} {'bf16' if spec.bf16 else 'fp32'} {spec.kills[0]}"
                print(f"{index + 1:3d}/{len(all_cases)} {name}: {verdict}", flush=True)
        finally:
            zygote.close()
    write_result(out, rows)
    return 0 if all(row["passed"] for row in rows) else 1


def write_result(out: Path, rows: list[dict[str, Any]]) -> None:
    """The result file: what was run where, every case, and recovery times less a step."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    less_a_step = [
        row["mttr_s"][0] - row["median_step_after_s"]
        for row in rows
        if row["mttr_s"] and row["median_step_after_s"]
    ]
    result = {
        "command": "python -m tests.deepspeed.matrix",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "cases": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "mttr_less_a_step_s": {
            "median": round(median(less_a_step), 4),
            "max": round(max(less_a_step), 4),
        },
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['passed']} of {result['cases']} cases passed; {out.name} written")


if __name__ == "__main__":
    raise SystemExit(main())
