"""`elaswave migrate`: layers change stage between two steps, and the run is what it would be."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.cli import run_command
from elaswave_plugin.observer import read_run
from elaswave_plugin.runtime.address_file import read_addresses
from tests.faults.conftest import Reference
from tests.faults.harness import Outcome, Zygote, check_equal, started
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_notice import TOLD, UNTIL_TOLD
from tests.faults.test_signals import LIMIT_S, wait_for_step

SPEC = replace(PP2_DP2, steps=14, options=(*PP2_DP2.options, "--num-layers=4"))


def test_layers_move_between_two_steps_and_come_back(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = replace(SPEC, kills=("3@11:backward",))
    held = replace(spec, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 2)
        address = read_addresses(tmp_path)[2].address
        command = ["migrate", "--connect", address]
        assert run_command([*command, "--layers", "0-1", "--to", "1"]) == 2
        assert "would leave a stage without layers" in capsys.readouterr().err
        assert run_command([*command, "--layers", "2", "--to", "0", "--reason", "a trial"]) == 0
        (tmp_path / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=spec, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(SPEC))
    moved, lost = (event["reason"] for event in run.events("view_committed")[1:])
    assert moved == "layers 2 move to stage 0: a trial" and "worker 3" in lost
    first = [event for event in run.events("recovered") if event["epoch"] == 2]
    assert len(first) == 4
    for event in first:
        assert (event["layout_before"]["cuts"], event["layout_after"]["cuts"]) == (
            [0, 2, 4],
            [0, 3, 4],
        )
    # Nothing but the layer that moves is read or gathered, and where it leaves, nothing is.
    come = {"weights": 4, "state": 4, "parts": 5}
    left = {"weights": 3, "state": 3, "parts": 3}
    assert sorted(e["in_place"]["parts"] for e in first) == [3, 3, 5, 5]
    assert all(e["in_place"] in (come, left) for e in first)
    ledger = read_run(tmp_path).ledger
    attempts = {(line["step"], line["epoch"]) for line in ledger if line["step"] != 11}
    assert len(attempts) == spec.steps - 1  # nothing was computed twice for the move
