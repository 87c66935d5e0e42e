"""The distance to which losses lead a run: none with keyed draws, some with draws by worker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.convergence import row_of
from tests.bench.conftest import Refused

COMMAND = [sys.executable, "-m", "benchmarks.convergence"]


def test_only_steps_from_the_first_loss_on_count() -> None:
    row = row_of([4.0, 3.0, 2.0, 1.0], [5.0, 3.0, 2.5, 1.25], first=2)
    assert (row["deviation"], row["largest"]) == (0.375, 0.5)


@pytest.mark.parametrize("option", ["--steps=7", "--seeds=0", "--nproc=2", "--plot=/nowhere/x.png"])
def test_bad_input_exits_with_2(option: str, refused: Refused) -> None:
    said = refused("convergence", option)
    assert len(said.splitlines()) == 1, said
    assert "wanted at least 8, 1 and 3" in said or "whose folder" in said


@pytest.mark.slow
def test_keyed_draws_leave_no_distance(tmp_path: Path) -> None:
    file, picture = tmp_path / "convergence.json", tmp_path / "convergence.png"
    options = ["--steps=12", "--seeds=1", "--nproc=4", f"--json={file}", f"--plot={picture}"]
    subprocess.run([*COMMAND, *options], check=True, timeout=300)
    result = json.loads(file.read_text())
    assert result["deviation"]["keyed"] == 0 < result["deviation"]["by worker"]
    assert picture.stat().st_size > 0
