"""Runs a list of fault cases, each against its reference, and says in one format what they did."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import described_commit
from elaswave_plugin.config import parse_kill
from elaswave_plugin.observer.observer import median_step_s, recoveries_of
from tests.faults.harness import JobSpec, Outcome, Zygote, launch

Row = dict[str, Any]


class Runs:
    """Launches that share a zygote and a dataset; each undisturbed run and each twin once."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._made: dict[JobSpec, Outcome] = {}
        self._count = 0

    def run(self, spec: JobSpec) -> Outcome:
        """Launch it."""
        self._count += 1
        directory = self._folder / f"run-{self._count}"
        return launch(spec, zygote=self._zygote, data=self._folder / "data", directory=directory)

    def reference(self, spec: JobSpec) -> Outcome:
        """The run that nothing disturbs."""
        nothing = replace(spec, kills=(), lost_trainers=(), lost_nodes=(), changes=())
        return self._once(nothing)

    def twin(self, spec: JobSpec) -> Outcome:
        """The run in which the same workers leave as planned, and come back as told."""
        kills = [parse_kill(kill) for kill in spec.kills]
        leaving = (f"{kill.slot}@{kill.step}" for kill in kills)
        return self._once(replace(spec, kills=(), changes=(*leaving, *spec.changes)))

    def _once(self, spec: JobSpec) -> Outcome:
        if spec not in self._made:
            self._made[spec] = self.run(spec)
        return self._made[spec]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMatrix:
    """A list of cases and what each of them has to fulfil."""

    framework: str
    cases: tuple[JobSpec, ...]
    # The fields of a specification in which the cases differ.
    fields: tuple[str, ...]
    preload: tuple[str, ...]
    # promise(specification): what a case has to fulfil, in words.
    promise: Callable[[Any], str]
    # check(run, runs) raises AssertionError.
    check: Callable[[Outcome, Runs], None]
    # run(specification, runs) runs a case.
    run: Callable[[Any, Runs], Outcome] = lambda spec, runs: runs.run(spec)
    # prepare(folder) writes what all runs read.
    prepare: Callable[[Path], None] = lambda folder: None

    def __str__(self) -> str:
        return f"{self.framework}, {len(self.cases)} cases"

    def identity(self, spec: JobSpec) -> Row:
        """Return what tells a case from the others, as the result file has it."""
        values = {name: getattr(spec, name) for name in self.fields}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def row_of(matrix: FaultMatrix, spec: JobSpec, runs: Runs) -> Row:
    """Run one case; one line of the result file."""
    failure = None
    run = matrix.run(spec, runs)
    try:
        matrix.check(run, runs)
    except AssertionError as error:
        failure = (str(error) or "an assertion failed").splitlines()[0][:300]
    survived = run.returncode == 0
    return {
        **matrix.identity(spec),
        "passed": failure is None,
        "failure": failure,
        "mttr_s": [round(one["mttr_s"], 4) for one in recoveries_of(run.files)] if survived else [],
        "median_step_after_s": median_step_s(run.files)["after"] if survived else None,
        "seconds": round(run.seconds, 2),
    }


def run_cases(matrix: FaultMatrix, first: int, stop: int) -> list[Row]:
    """Run the cases [first, stop) of a matrix."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="elaswave-matrix-") as name:
        folder = Path(name)
        matrix.prepare(folder / "data")
        zygote = Zygote(folder, matrix.preload)
        runs = Runs(zygote, folder)
        try:
            for index, spec in enumerate(matrix.cases[first:stop], start=first):
                rows.append(row := row_of(matrix, spec, runs))
                words = " ".join(f"{value}" for value in matrix.identity(spec).values())
                verdict = f"ok {row['mttr_s']}" if row["passed"] else f"FAILED {row['failure']}"
                place = f"{index + 1:3d}/{len(matrix.cases)}"
                print(f"{matrix.framework} {place} {words}: {verdict}", flush=True)
        finally:
            zygote.close()
    return rows


def result_of(matrix: FaultMatrix, rows: list[Row]) -> Row:
    """The result file: what was run where, the times from a fault to the next step, every case."""
    times_s = [time_s for row in rows for time_s in row["mttr_s"]]
    # The step after the change is known for the last change only.
    beyond_s = [
        row["mttr_s"][-1] - row["median_step_after_s"]
        for row in rows
        if row["mttr_s"] and row["median_step_after_s"]
    ]
    return {
        "command": f"python -m tests.matrix --only {matrix.framework}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": described_commit(),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "cases": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "mttr_s": median_and_max(times_s),
        "mttr_less_a_step_s": median_and_max(beyond_s),
        "rows": rows,
    }


def median_and_max(values: list[float]) -> dict[str, float | None]:
    """Both to a tenth of a millisecond; None without values."""
    if not values:
        return {"median": None, "max": None}
    return {"median": round(median(values), 4), "max": round(max(values), 4)}


def joined(matrix: FaultMatrix, before: Row | None, rows: list[Row]) -> list[Row]:
    """The rows, and those of the cases that ran before on the same commit, in the list's order."""
    known = before["rows"] if before and before["commit"] == described_commit() else []
    found = {identity_text(matrix, row): row for row in [*known, *rows]}
    order = [json.dumps(matrix.identity(spec)) for spec in matrix.cases]
    return [found[one] for one in order if one in found]


def identity_text(matrix: FaultMatrix, row: Row) -> str:
    """Return what tells a row from the others, as text."""
    return json.dumps({name: row[name] for name in matrix.fields})
