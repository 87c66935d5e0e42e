"""`elaswave drain SLOT`: the worker leaves between two steps, and the run is what it would be."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.observer.run import read_run
from tests.faults.conftest import Reference
from tests.faults.harness import Outcome, Zygote, check_equal, started
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_notice import SPEC as OF_FOUR_NODES
from tests.faults.test_notice import TOLD, UNTIL_TOLD
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SPEC = replace(OF_FOUR_NODES, nodes=1)


@proves(Kind.LEAVE, Promise.EQUAL)
@pytest.mark.parametrize("slot", sampled([0, 2]))
def test_a_drained_worker_leaves_between_two_steps(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
    slot: int,
) -> None:
    held = replace(SPEC, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        (other,) = read_addresses(tmp_path)
        words = ["--connect", other.address, "--reason", "node 7 gets new memory"]
        assert run_command(["drain", str(slot), *words]) == 0
        (shows,) = re.findall("`elaswave (.*)` shows when it has", capsys.readouterr().out)
        assert run_command(shlex.split(shows)) == 0
        (tmp_path / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=SPEC, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(replace(SPEC, respawn=0)))
    left = run.events("view_committed")[-1]
    assert sorted(left["ranks"]) == sorted({0, 1, 2, 3} - {slot})
    assert left["reason"].endswith("node 7 gets new memory")
    attempts = {(line["step"], line["epoch"]) for line in read_run(tmp_path).ledger}
    assert len(attempts) == SPEC.steps  # every step was computed once
    assert read_addresses(tmp_path) == []


@proves(Kind.LEAVE, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slots", "rest"),
    sampled([((0, 3), [1, 2]), ((2, 0), [1, 3]), ((0, 1, 2), [2, 3])]),
    ids=str,
)
def test_workers_of_a_pipeline_that_are_drained_within_a_step_leave_at_once(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    slots: tuple[int, ...],
    rest: list[int],
) -> None:
    """With one change of the view; as many of them as leave somebody to each stage."""
    spec = replace(PP2_DP2, steps=SPEC.steps, dump="last")
    held = replace(spec, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        for slot in slots:
            assert run_command(["drain", str(slot), str(tmp_path)]) == 0
        (tmp_path / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=spec, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(spec))
    _, left = run.events("view_committed")
    assert sorted(left["ranks"]) == rest
    stays = [event["slot"] for event in run.events("notice_void")]
    assert stays == [slot for slot in slots if slot in rest]
    assert ("stays: 1 worker would be left for 2 stages" in output) == bool(stays)
    attempts = {(line["step"], line["epoch"]) for line in read_run(tmp_path).ledger}
    assert len(attempts) == spec.steps  # every step was computed once
    assert read_addresses(tmp_path) == []
