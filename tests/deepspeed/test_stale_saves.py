"""DeepSpeed's saves: a worker that was given up sets neither a tag nor `latest` back."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.checkpoints.deepspeed_tag import flaw_of
from tests.checkpoints.stale import STOP_BEFORE, TAKES_NOTHING_AWAY, Stale
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Zygote, check_survived
from tests.proofs import Kind, Promise, proves

# The call before which it stops, and the beginning of the name that it is about to change.
TAG, LATEST = ("rename", "global_step2.part-"), ("replace", "latest.part-")


@pytest.fixture
def stale(zygote: Zygote, tmp_path: Path) -> Stale:
    return Stale(zygote, tmp_path / "run", tmp_path / "run")


def spec_of(tmp_path: Path, stops: tuple[str, str]) -> EngineSpec:
    act, begins = stops
    return EngineSpec(
        nproc=4,
        nodes=4,
        steps=6,
        script=str(SCRIPTS / "saving.py"),
        options=(f"--save={tmp_path / 'saved'}",),
        dump="never",
        launcher=("--quorum-wait-s=1",),
        sabotage=STOP_BEFORE.format(act=act, begins=begins, directory=tmp_path / "run"),
    )


@proves(Kind.ZOMBIE, Promise.WHOLE, victim="0", moment="2:save")
@pytest.mark.parametrize("stops", [TAG, LATEST], ids=["tag", "latest"])
@pytest.mark.timeout(300)
def test_paused_before_it_publishes_it_leaves_the_others_checkpoints(
    stale: Stale, tmp_path: Path, stops: tuple[str, str]
) -> None:
    saves = tmp_path / "saved"
    run, error, before, after = stale.run(spec_of(tmp_path, stops), saves)
    assert error == "FileNotFoundError"
    assert len(before) > 9 and after == before
    for step in (2, 4, 6):
        assert flaw_of(saves / f"global_step{step}") is None
    assert (saves / "latest").read_text() == "global_step6"
    check_survived(run)


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_nothing_is_taken_away_latest_is_set_back(stale: Stale, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LATEST)
    spec = replace(spec, sabotage=spec.sabotage + TAKES_NOTHING_AWAY)
    _, error, before, after = stale.run(spec, tmp_path / "saved")
    assert error is None and after != before
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"
