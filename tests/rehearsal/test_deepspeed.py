"""Rehearsals of DeepSpeed scripts, each compared with the same departures as planned."""

from pathlib import Path

import pytest

from tests.deepspeed.harness import EngineSpec
from tests.rehearsal import engine_scripts
from tests.rehearsal.conftest import Rehearse

pytestmark = [pytest.mark.timeout(540), pytest.mark.slow]
_PARTS = "from elaswave_plugin.runtime import engine_parts; "
_NEVER = "lambda self, *kept: None"
# The remedy that is switched off, the run that finds it, and words of what it names.
TABLE = (
    ("G1 second engine", engine_scripts.SECOND_ENGINE, "", "losses", "judge"),
    (
        "G3 running mean",
        engine_scripts.RUNNING_MEAN,
        f"{_PARTS}b = engine_parts.Buffers; b.check = b.put_back = {_NEVER}; b.agree = {_NEVER}",
        "losses",
        "buffer usual",
    ),
    (
        "G4 teacher",
        engine_scripts.TEACHER,
        f"{_PARTS}engine_parts.Frozen.keep = {_NEVER}",
        "returns-2",
        "teacher.weight",
    ),
)


def test_the_example_is_equal(rehearse_engine: Rehearse) -> None:
    found = rehearse_engine(
        EngineSpec(nproc=3, steps=20, global_batch=6), runs=("losses", "returns")
    )
    assert found.exit_code == 0, found.output
    assert all(kill["fired"] for run in found.verdict["runs"] for kill in run["kills"])
    compared = {run["compared_with"] for run in found.verdict["runs"]}
    assert compared == {"the same changes as planned"}


@pytest.mark.parametrize(
    ("number", "changes", "statement", "run", "names"), TABLE, ids=[r[0] for r in TABLE]
)
def test_it_is_found(
    rehearse_engine: Rehearse,
    tmp_path: Path,
    number: str,
    changes: tuple[engine_scripts.Change, ...],
    statement: str,
    run: str,
    names: str,
) -> None:
    script = engine_scripts.write(tmp_path, *changes)
    spec = EngineSpec(nproc=3, steps=20, global_batch=6, script=script, sabotage=statement)
    found = rehearse_engine(spec, runs=(run,))
    assert found.exit_code == 1, found.output
    print(f"{number}: {found.named}")
    assert names in found.named
