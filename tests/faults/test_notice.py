"""A worker that is told to go leaves between two steps: nothing is replayed, nothing is lost."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer.run import read_run
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, started
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# After they were told, others may be told too for a second, before the first of them leaves.
SPEC = JobSpec(steps=60, dump="last", respawn=10)
TOLD = "told"
# Step 6 begins once the test has told whom to go: the others have many steps left then.
UNTIL_TOLD = f"""
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin = GuardedSteps.begin
def wait(self):
    begin(self)
    told = self.worker.events.path.with_name("{TOLD}")
    deadline_s = time.monotonic() + 60
    while self.worker.completed == 6 and not told.exists():
        self.worker.member.check()
        assert time.monotonic() < deadline_s, "nobody was told to go"
        time.sleep(0.005)
GuardedSteps.begin = wait
"""


def supervisor_of(directory: Path, slot: int) -> int:
    """The process id of a worker's supervisor."""
    started = [e for e in read_lines(directory / EVENTS_FILE) if e["kind"] == "worker_started"]
    pid: int = next(e["supervisor_pid"] for e in started if e["slot"] == slot)
    return pid


@proves(Kind.LEAVE, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slots", "number"),
    sampled([((2,), signal.SIGTERM), ((0,), signal.SIGUSR1), ((1, 3), signal.SIGTERM)], share=2),
    ids=str,
)
def test_a_worker_that_is_told_to_go_leaves_between_two_steps(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    slots: tuple[int, ...],
    number: signal.Signals,
) -> None:
    held = replace(SPEC, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        for slot in slots:
            os.kill(supervisor_of(tmp_path, slot), number)
        (tmp_path / TOLD).touch()
        code = launcher.wait(LIMIT_S * 3)
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=SPEC, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(replace(SPEC, respawn=0)))
    left = run.events("view_committed")[-1]
    assert sorted(left["ranks"]) == sorted({0, 1, 2, 3} - set(slots))
    assert f"told to end by {number.name}" in left["reason"]
    ended = {(event["slot"], event["status"]) for event in run.events("worker_exited")}
    assert {(slot, "exit code 0") for slot in slots} <= ended
    # Every step was computed once.
    attempts = {(line["step"], line["epoch"]) for line in read_run(tmp_path).ledger}
    assert len(attempts) == SPEC.steps
    assert "Traceback" not in output
