"""Runs all cases of parted nodes, by hand, and writes how long the others stood still.

python -m tests.parted [--draw 5] [--only TEXT] [--json FILE]

With ``--draw``, so many of each pair, direction and kind of moment, over jobs and phases by chance.
"""

import argparse
import json
import random
import signal
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from elaswave_plugin.demo.text import find_text, write_dataset
from tests.faults.harness import JobSpec, Outcome, Zygote, launch
from tests.faults.parted_cases import ALL_PRELOADED, NODES, Case, cases, check
from tests.faults.parting import run_parted, warm_nodes

Kind = tuple[str, str, str]


def main() -> int:
    """Run them in turn; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.draw is not None and options.draw < 1:
        parser.error(f"--draw is {options.draw}, wanted 1 or more")
    chosen = [case for case in cases() if options.only in str(case)]
    if not chosen:
        parser.error(f"--only is {options.only!r}, which is in no case's name")
    if options.draw is not None:
        chosen = drawn(chosen, options.draw)
    # So that nothing of it is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = circumstances("tests.parted")
    pauses, failures = run_all(chosen)
    found |= {"rows": rows_of(pauses), "failures": failures}
    for row in found["rows"]:
        print(row)
    for failure in failures:
        print(failure)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failures else 0


def drawn(among: list[Case], count: int) -> list[Case]:
    """Draw so many of each kind, alike in every run."""
    groups = defaultdict[Kind, list[Case]](list)
    for case in among:
        groups[kind_of(case)].append(case)
    dice = random.Random(count)
    return [one for group in groups.values() for one in dice.sample(group, min(count, len(group)))]


def kind_of(case: Case) -> Kind:
    """The row of the table that a case belongs to."""
    return case.pair, "one way" if case.one_way else "both ways", case.within


def run_all(chosen: list[Case]) -> tuple[dict[Case, float], list[str]]:
    """Return the pauses of each case in seconds, and what failed."""
    pauses, failures = dict[Case, float](), list[str]()
    with tempfile.TemporaryDirectory(prefix="parted-") as scratch:
        folder = Path(scratch)
        data = folder / "data"
        data.mkdir()
        write_dataset(find_text(Path(sysconfig.get_path("stdlib")) / "json"), data / "text")
        zygote = Zygote(folder, ALL_PRELOADED)
        made: dict[JobSpec, Outcome] = {}

        def once(spec: JobSpec) -> Outcome:
            if spec not in made:
                where = Path(tempfile.mkdtemp(dir=folder))
                made[spec] = launch(spec, zygote=zygote, data=data, directory=where)
            return made[spec]

        try:
            with warm_nodes(NODES, ALL_PRELOADED, folder) as nodes:
                for case in chosen:
                    where = Path(tempfile.mkdtemp(dir=folder))
                    try:
                        parted = run_parted(case.spec, case.cut, nodes, data=data, directory=where)
                        check(case, parted, launched=once)
                    except Exception as error:  # the others are run all the same
                        failures.append(f"{case}: {error!r:.500}")
                        print(failures[-1], flush=True)
                        continue
                    pauses[case] = parted.pause_s
                    print(f"{case}: {parted.pause_s:.2f} s", flush=True)
        finally:
            zygote.close()
    return pauses, failures


def rows_of(pauses: dict[Case, float]) -> list[dict[str, Any]]:
    """One row by pair, direction and kind: how long the others stood still."""
    grouped = defaultdict[Kind, list[float]](list)
    for case, seconds in pauses.items():
        grouped[kind_of(case)].append(seconds)
    return [
        {
            "pair": pair,
            "way": way,
            "within": within,
            "runs": len(seconds),
            "median_s": round(median(seconds), 2),
            "max_s": round(max(seconds), 2),
        }
        for (pair, way, within), seconds in grouped.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
