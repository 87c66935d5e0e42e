"""A worker that was stopped, given up, and goes on: nothing of it reaches the others any more."""

import os
import signal
import time
from pathlib import Path

from elaswave_plugin.observer import read_run
from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, check_equal, left_alive, started
from tests.faults.test_signals import wait_for_step

# A node each: the others cannot kill it, they can only shut it out.
SPEC = JobSpec(nproc=4, nodes=4, steps=20, dump="last")
ZOMBIE = 2
LIMIT_S = 60.0


def test_a_zombie_delivers_nothing(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    with started(SPEC, zygote=zygote, data=data, directory=tmp_path) as launchers:
        wait_for_step(tmp_path, 3)
        events = Tail(tmp_path / EVENTS_FILE)
        starts = [e for e in events.new() if e["kind"] == "worker_started"]
        pids = next((e["pid"], e["supervisor_pid"]) for e in starts if e["slot"] == ZOMBIE)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + LIMIT_S
        while not any(e["kind"] == "view_committed" and e["epoch"] == 2 for e in events.new()):
            assert time.monotonic() < deadline_s, (tmp_path / "output").read_text()[-3000:]
            time.sleep(0.02)  # the file is all that a running job shows
        assert left_alive(pids, limit_s=0.0) == pids
        awake_s = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert left_alive(pids, limit_s=LIMIT_S) == ()
        codes = [launcher.wait(LIMIT_S) for launcher in launchers]
    assert [bool(code) for code in codes] == [slot == ZOMBIE for slot in range(4)]
    output = (tmp_path / "output").read_text()
    run = Outcome(spec=SPEC, directory=tmp_path, returncode=0, output=output, seconds=0)
    check_equal(run, reference(SPEC))
    files = read_run(tmp_path)
    # It may finish the step whose bytes it had, in the epoch in which it was given up.
    late = [r for r in (*files.steps, *files.ledger) if r["slot"] == ZOMBIE]
    assert {r["epoch"] for r in late} == {1}
    assert len([r for r in files.steps if r["slot"] == ZOMBIE and r["time_s"] > awake_s]) <= 1
    # It saw its links closed by all others, and a node of four is no majority.
    assert "only 1 of 4 nodes can be reached, which is no majority" in output, output[-2000:]
