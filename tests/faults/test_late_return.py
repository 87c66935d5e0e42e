"""A worker that was started again and does not come is told while the others train."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaswave_plugin.agent.late_return import LEAST_S
from elaswave_plugin.cli.status import ask_job, find_job
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.faults.harness import JobSpec, Zygote, left_alive, pids_of, started
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.faults.test_status import ask_until
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves

# One that was started again waits for somebody, as in a rendezvous of the script's own.
WAITS = """
import pathlib, time
from elaswave_plugin.trainer.member import Member
join_now = Member.join
def wait_for_others(self):
    deadline_s = time.monotonic() + 150
    while not pathlib.Path("seen").exists():
        assert time.monotonic() < deadline_s, "nobody has asked for the status"
        time.sleep(0.005)
def join_once_seen(self, *args, **more):
    if self.incarnation:
        wait_for_others(self)
    return join_now(self, *args, **more)
Member.join = join_once_seen
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@proves(Kind.RETURN, Promise.STATUS, victim="1")
def test_one_that_does_not_come_is_told_with_the_line_that_it_is_in(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    endless = JobSpec(nproc=2, steps=1_000_000, dump="never", respawn=1, sabotage=WAITS)
    with started(endless, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        before = ask_job(find_job(tmp_path, None), LIMIT_S)
        os.kill(before["workers"][1]["trainer_pid"], signal.SIGKILL)
        deadline = Deadline(LEAST_S + LIMIT_S)
        while not (told := late(tmp_path)):
            assert deadline.left_s(), (tmp_path / "output").read_text()[-2000:]
            time.sleep(0.1)
        status = ask_job(find_job(tmp_path, None), LIMIT_S)
        command = [sys.executable, "-m", "elaswave_plugin.cli.main", "status", str(tmp_path)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        (tmp_path / "seen").touch()
        ask_until(tmp_path, lambda status: status["view"]["epoch"] == 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(LIMIT_S) == 143
    assert left_alive(pids_of(tmp_path), limit_s=LIMIT_S) == ()
    (line,) = told
    assert "wait_for_others" in line
    said = f"worker 1 was started again {LEAST_S:.0f} s ago and has not come so far as to enter"
    output = (tmp_path / "output").read_text()
    assert output.count(said) == 1 and f"it is in {line}; the job goes on without it" in output
    assert status["workers"][1]["waits_for"] == line and "wait_for_others" in shown, shown
    assert status["view"]["ranks"] == [0]


def late(folder: Path) -> list[str]:
    """The lines of workers that were told to be late."""
    events = read_lines(folder / EVENTS_FILE)
    return [event["line"] for event in events if event["kind"] == "late_return"]
