"""The fault matrices of all frameworks: runs them and writes their result files.

python -m tests.matrix [--only megatron|hybrid|deepspeed|trainer] [--cases FIRST:STOP]
                       [--out FOLDER]
"""

import argparse
import json
from pathlib import Path

from tests.deepspeed.matrix import MATRIX as DEEPSPEED
from tests.deepspeed.trainer_matrix import MATRIX as TRAINER
from tests.fault_matrix import FaultMatrix, joined, result_of, run_cases
from tests.faults.harness import ROOT
from tests.faults.hybrid_matrix import MATRIX as HYBRID
from tests.faults.matrix import MATRIX as MEGATRON

MATRICES = (MEGATRON, HYBRID, DEEPSPEED, TRAINER)


def span(text: str) -> tuple[int, int]:
    """Read FIRST:STOP."""
    first, stop = text.split(":")
    return int(first), int(stop)


def run_matrix(matrix: FaultMatrix, cases: tuple[int, int] | None, folder: Path) -> bool:
    """Run it, or the part [first, stop) of it, and write its file; whether all of that passed."""
    out = folder / f"fault_matrix_{matrix.framework}.json"
    before = json.loads(out.read_text()) if cases and out.is_file() else None
    rows = run_cases(matrix, *(cases or (0, len(matrix.cases))))
    result = result_of(matrix, joined(matrix, before, rows))
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{matrix}: {result['passed']} of {result['cases']} passed; {out.name} written")
    return all(row["passed"] for row in rows)


def main() -> int:
    """Run the matrices; exit code 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[one.framework for one in MATRICES], help="one of them")
    parser.add_argument(
        "--cases",
        type=span,
        metavar="FIRST:STOP",
        help="a part; the other rows of the result file stay where they are of the same commit",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in MATRICES if options.only in (None, one.framework)]
    passed = [run_matrix(matrix, options.cases, options.out) for matrix in chosen]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
