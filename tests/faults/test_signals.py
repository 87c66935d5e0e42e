"""A launcher that is told to end, or killed, in the middle of training takes everything with it."""

import signal
import time
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import STEPS_FILE, Tail
from tests.faults.harness import JobSpec, Zygote, left_alive, pids_of, started
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves

LIMIT_S = 30.0
ENDLESS = JobSpec(steps=100_000, dump="never")


def wait_for_step(directory: Path, step: int) -> None:
    """Wait until some worker has completed a step."""
    steps = Tail(directory / STEPS_FILE)
    deadline = Deadline(LIMIT_S)
    while not any(record["step"] >= step for record in steps.new()):
        assert deadline.left_s(), (directory / "output").read_text()[-4000:]
        time.sleep(0.02)  # the file is all that a running job shows


@proves(Kind.SIGNAL, Promise.CLEAN)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_leaves_no_process(
    zygote: Zygote, data: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with started(ENDLESS, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        pids = pids_of(tmp_path)
        assert len(pids) == 8 and left_alive(pids, limit_s=0.0) == pids
        launcher.send_signal(number)
        assert launcher.wait(LIMIT_S) == code
    assert left_alive(pids, limit_s=LIMIT_S) == ()
    assert "Traceback" not in (tmp_path / "output").read_text()
