"""`elaswave drain` in a job of pipelines: a worker that its stage needs stays."""

from dataclasses import replace
from pathlib import Path

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.ipc.address_file import read_addresses
from tests.deepspeed.conftest import Twin
from tests.deepspeed.test_pipeline import PP2_DP2
from tests.faults.harness import Outcome, Zygote, check_survived, started
from tests.faults.test_notice import SPEC, TOLD, UNTIL_TOLD
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves


@proves(Kind.LEAVE, Promise.STAYS)
def test_the_last_worker_of_a_pipelines_stage_stays(
    zygote: Zygote, tmp_path: Path, twin: Twin
) -> None:
    """Both of the first stage are asked within one step."""
    spec = replace(PP2_DP2, steps=SPEC.steps)
    held = replace(spec, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=tmp_path, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        for slot in (0, 1):
            assert run_command(["drain", str(slot), str(tmp_path)]) == 0
        (tmp_path / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=spec, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_survived(run)
    _, left = run.events("view_committed")
    assert sorted(left["ranks"]) == [1, 2, 3]
    assert [event["slot"] for event in run.events("notice_void")] == [1]
    assert "stays: stage 0 would have no worker, and workers keep theirs: in DeepSpeed's" in output
    first = min(line["step"] for line in run.files.ledger if line["epoch"] == left["epoch"])
    assert run.trace() == twin(replace(spec, changes=(f"0@{first}",))).trace()
    assert len({(line["step"], line["epoch"]) for line in run.files.ledger}) == spec.steps
    assert read_addresses(tmp_path) == []
