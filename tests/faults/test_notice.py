"""A worker that is told to go leaves between two steps: nothing is replayed, nothing is lost."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer.run import read_run
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, started
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# After they were told, others may be told too for a second, before the first of them leaves.
SPEC = JobSpec(nodes=4, steps=60, dump="last", respawn=10)
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


@proves(Kind.LEAVE, Promise.EQUAL)
@pytest.mark.parametrize(
    ("slots", "number"),
    sampled([((2,), signal.SIGTERM), ((0,), signal.SIGUSR1), ((1, 3), signal.SIGTERM)]),
    ids=str,
)
def test_a_node_that_is_told_to_go_leaves_between_two_steps(
    zygote: Zygote,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    slots: tuple[int, ...],
    number: signal.Signals,
) -> None:
    held = replace(SPEC, sabotage=UNTIL_TOLD)
    with started(held, zygote=zygote, data=data, directory=tmp_path) as launchers:
        wait_for_step(tmp_path, 3)
        for node in slots:
            launchers[node].send_signal(number)
        (tmp_path / TOLD).touch()
        codes = [launcher.wait(LIMIT_S * 3) for launcher in launchers]
    assert [code for node, code in enumerate(codes) if node in slots] == [
        128 + number for _ in slots
    ]
    (code,) = {code for node, code in enumerate(codes) if node not in slots}
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=SPEC, directory=tmp_path, returncode=code, output=output, seconds=0)
    check_equal(run, reference(replace(SPEC, respawn=0)))
    left = run.events("view_committed")[-1]
    assert sorted(left["ranks"]) == sorted({0, 1, 2, 3} - set(slots))
    assert "told to end by SIGTERM" in left["reason"]
    ended = {(event["slot"], event["status"]) for event in run.events("worker_exited")}
    assert {(slot, "exit code 0") for slot in slots} <= ended
    # Every step was computed once.
    attempts = {(line["step"], line["epoch"]) for line in read_run(tmp_path).ledger}
    assert len(attempts) == SPEC.steps
    assert "Traceback" not in output
