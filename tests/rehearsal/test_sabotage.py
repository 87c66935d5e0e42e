"""A rehearsal finds by itself what a remedy prevents, once that is switched off or not used."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse, Rehearsed
from tests.rehearsal.sabotages import ENGINE_TABLE, TABLE, EngineSabotage, Sabotage

pytestmark = [pytest.mark.timeout(540), pytest.mark.slow]
Noted = Callable[[str, Rehearsed], None]


@pytest.fixture(scope="module")
def noted(request: pytest.FixtureRequest) -> Iterator[Noted]:
    """Notes what was named of a sabotage; at the end the table of all is in pytest's report."""
    rows: list[str] = []

    def note(number: str, found: Rehearsed) -> None:
        first, *more = found.named.splitlines()
        rows.append(f"{number}: {first}")
        rows.extend(f"{'':8}{line}" for line in more[:3])

    yield note
    report = request.config.pluginmanager.get_plugin("terminalreporter")
    if report is not None:
        for row in ("", "sabotage: what the rehearsal names first, and beside it", *rows):
            report.write_line(row)


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.number)
def test_it_is_found(rehearse: Rehearse, tmp_path: Path, noted: Noted, row: Sabotage) -> None:
    script = own_scripts.write(tmp_path, *row.changes)
    spec = JobSpec(nproc=3, steps=20, global_batch=6, script=script, options=row.options)
    found = rehearse(replace(spec, sabotage=row.statement), "--steps=5", runs=(row.run,))
    assert found.exit_code == 1, found.output
    noted(row.number, found)
    assert row.names in found.named


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.parametrize("row", ENGINE_TABLE, ids=lambda row: row.number)
def test_it_is_found_in_an_engine(
    rehearse_engine: Rehearse, noted: Noted, row: EngineSabotage
) -> None:
    found = rehearse_engine(replace(row.spec, steps=20), "--steps=6", runs=(row.run,))
    assert found.exit_code == 1, found.output
    noted(row.number, found)
    assert row.names in found.named
