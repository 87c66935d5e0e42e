"""`elaswave migrate`: layers change stage between two steps, and the run is what it would be."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.cli import run_command
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.migrate import migrate_layers
from elaswave_plugin.observer import counted_steps, read_run
from elaswave_plugin.runtime.address_file import read_addresses
from elaswave_plugin.status import ask_job
from tests.faults.conftest import Reference
from tests.faults.harness import Outcome, Zygote, check_equal, started
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_notice import TOLD, UNTIL_TOLD
from tests.faults.test_signals import LIMIT_S, wait_for_step

SPEC = replace(PP2_DP2, steps=14, options=(*PP2_DP2.options, "--num-layers=4"))


# What is asked for, and what the sentence says.
BAD = {
    "no such stage": ("2", "99", "there is no stage 99, wanted one of 0 to 1"),
    "no range": ("1,2", "1", "--layers is '1,2', wanted a number or a range"),
    "an open range": ("1-", "1", "--layers is '1-', wanted a number or a range"),
    "a range from nowhere": ("-1", "1", "--layers is '-1', wanted a number or a range"),
    "two ranges": ("1-2-3", "1", "--layers is '1-2-3', wanted a number or a range"),
    "no number": ("one", "1", "--layers is 'one', wanted a number or a range"),
    "backwards": ("3-2", "0", "layers are 3-2, wanted some of 0-3"),
    "no such layer": ("4-6", "0", "layers are 4-6, wanted some of 0-3"),
    "a gap": ("3", "0", "with layers that are not contiguous (stage 0: 0-1, stage 1: 2-3)"),
    "nothing left": ("0-1", "1", "would leave a stage without layers"),
    "there already": ("2-3", "1", "layers 2-3 are at stage 1 already"),
}


def test_a_bad_move_costs_one_sentence_and_nothing_moves(
    zygote: Zygote, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a running job, which ends as it began: in its first view, by its first cuts."""
    held = replace(SPEC, steps=8, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 2)
        address = read_addresses(tmp_path)[2].address
        for name, (layers, stage, words) in BAD.items():
            command = ["migrate", "--connect", address, f"--layers={layers}", f"--to={stage}"]
            assert run_command(command) == 2, name
            said = capsys.readouterr()
            assert said.out == "" and said.err.count("\n") == 1 and words in said.err, said
        status = ask_job(read_addresses(tmp_path), 5)
        assert status["layout"]["cuts"] == [0, 2, 4]
        (tmp_path / TOLD).touch()
        assert launcher.wait(LIMIT_S) == 0
    events = read_run(tmp_path)
    assert len(events.of_kind("view_committed")) == 1 and not events.of_kind("recovered")
    assert len(counted_steps(events)) == held.steps


def test_a_range_that_is_none_is_refused_before_anyone_is_asked() -> None:
    with pytest.raises(ConfigurationError, match="--layers is '4-'"):
        migrate_layers([], layers="4-", stage=0, reason="", timeout_s=1)


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
