"""A rehearsal finds by itself what a remedy prevents, once that is switched off or not used."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.harness import JobSpec
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.sabotages import ENGINE_TABLE, TABLE, EngineSabotage, Sabotage

pytestmark = [pytest.mark.timeout(540), pytest.mark.slow]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.number)
def test_it_is_found(rehearse: Rehearse, tmp_path: Path, row: Sabotage) -> None:
    script = own_scripts.write(tmp_path, *row.changes)
    spec = JobSpec(nproc=3, steps=20, global_batch=6, script=script, options=row.options)
    found = rehearse(replace(spec, sabotage=row.statement), "--steps=5", runs=(row.run,))
    assert found.exit_code == 1, found.output
    print(f"{row.number}: {found.named}")
    assert row.names in found.named


@pytest.mark.parametrize("row", ENGINE_TABLE, ids=lambda row: row.number)
def test_it_is_found_in_an_engine(rehearse_engine: Rehearse, row: EngineSabotage) -> None:
    found = rehearse_engine(replace(row.spec, steps=20), "--steps=6", runs=(row.run,))
    assert found.exit_code == 1, found.output
    print(f"{row.number}: {found.named}")
    assert row.names in found.named
