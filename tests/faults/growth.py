"""Jobs that were launched with a reserve, and which workers join while they run."""

import time
from dataclasses import replace
from pathlib import Path

from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.faults.harness import JobSpec, Outcome, Zygote, open_launcher, started
from tests.idle import Deadline

LIMIT_S = 60.0


def grow(
    spec: JobSpec, *, joiners: int = 1, zygote: Zygote, data: Path, directory: Path
) -> Outcome:
    """Run a job that so many workers join as soon as it has begun; its outcome."""
    started_s = time.monotonic()
    with started(spec, zygote=zygote, data=data, directory=directory) as launchers:
        events = Tail(directory / EVENTS_FILE)
        deadline = Deadline(LIMIT_S)
        while not any(e["kind"] == "view_committed" for e in events.new()):
            assert deadline.left_s(), (directory / "output").read_text()[-3000:]
            time.sleep(0.02)  # the file is all that a running job shows
        place = [f"--join={read_addresses(directory)[0]}", f"--nproc-per-node={joiners}"]
        launchers.append(open_launcher(spec, place, zygote=zygote, data=data, directory=directory))
        codes = [launcher.wait(LIMIT_S) for launcher in launchers]
    output = (directory / "output").read_text()
    assert not any(codes), output[-4000:]
    seconds = time.monotonic() - started_s
    return Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=seconds)


def without_reserve(spec: JobSpec) -> JobSpec:
    """The same job, which cannot grow."""
    return replace(spec, launcher=())


def widths(run: Outcome) -> list[int]:
    """Return the number of workers of each view."""
    return [len(event["ranks"]) for event in run.events("view_committed")]
