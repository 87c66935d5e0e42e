"""A worker that was given up between its question and its rename replaces no checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.checkpoints.torch_dist import flaw_of
from tests.checkpoints.stale import STOP_BEFORE, TAKES_NOTHING_AWAY, Stale
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Zygote, check_equal
from tests.proofs import Kind, Promise, proves

TRACKER = "latest_checkpointed_iteration.txt"
# The call before which it stops, and the beginning of the name that it is about to change.
FOLDER, FILE = ("rename", "iter_0000004.part-"), ("replace", f"{TRACKER}.part-")
SPEC = JobSpec(nproc=4, nodes=4, steps=12, dump="last", launcher=("--quorum-wait-s=1",))


@pytest.fixture
def stale(zygote: Zygote, data: Path, tmp_path: Path) -> Stale:
    return Stale(zygote, data, tmp_path / "run")


def spec_of(tmp_path: Path, stops: tuple[str, str]) -> JobSpec:
    act, begins = stops
    return replace(
        SPEC,
        options=(f"--save={tmp_path / 'saved'}", "--save-interval=4"),
        sabotage=STOP_BEFORE.format(act=act, begins=begins, directory=tmp_path / "run"),
    )


@proves(Kind.ZOMBIE, Promise.WHOLE, victim="0", moment="4:save")
@pytest.mark.parametrize("stops", [FOLDER, FILE], ids=["folder", "tracker"])
@pytest.mark.timeout(300)
def test_paused_before_it_publishes_it_leaves_the_others_checkpoints(
    stale: Stale, reference: Reference, tmp_path: Path, stops: tuple[str, str]
) -> None:
    run, error, before, after = stale.run(spec_of(tmp_path, stops), tmp_path / "saved")
    assert error == "FileNotFoundError"
    assert len(before) > 12 and after == before
    for done in (4, 8, 12):
        assert flaw_of(tmp_path / "saved" / f"iter_{done:07d}") is None
    assert (tmp_path / "saved" / TRACKER).read_text() == "12"
    check_equal(run, reference(SPEC))


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_nothing_is_taken_away_it_replaces_one(stale: Stale, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FOLDER)
    spec = replace(spec, sabotage=spec.sabotage + TAKES_NOTHING_AWAY)
    _, error, before, after = stale.run(spec, tmp_path / "saved")
    # Its rename finds the others' checkpoint, and exchanges the two.
    assert error is not None and after != before
