"""A worker that is paused right before it publishes, until all others have ended, and goes on."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from elaswave_plugin.checkpoints.draft import is_draft
from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.faults.harness import JobSpec, Outcome, Zygote, left_alive, processes_of, started
from tests.idle import Deadline

LIMIT_S = 90.0
# The worker of slot 0 stops when it has asked the lease, before this call for a name with this
# beginning. No signal tells its main thread that it goes on, as where a freezer or a hypervisor
# has stopped it.
STOP_BEFORE = """
import os, signal, time
from pathlib import Path
from elaswave_plugin.tracking.events import EventLog
act, done = Path.{act}, []
def stop_first(self, target):
    publishes = self.name.startswith("{begins}") and Path(target).name in "{begins}"
    if os.environ["ELASWAVE_SLOT"] != "0" or not publishes or done:
        return act(self, target)
    done.append(True)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    with EventLog("{directory}/events.jsonl") as events:
        events.emit("stops", slot=0, there=self.exists())
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # it reaches a thread beside the main one a moment later
        try:
            act(self, target)
        except OSError as error:
            events.emit("tried", error=type(error).__name__)
            raise
        events.emit("tried", error=None)
Path.{act} = stop_first
"""
# What is to hold it back does not: a negative control.
TAKES_NOTHING_AWAY = """
from elaswave_plugin.checkpoints import draft
draft._take_away_others = lambda place, attempt: None
"""

Listing = dict[str, tuple[int, int, int]]


def published(saves: Path) -> Listing:
    """Every file under a name that users know: inode, size and time of its last change."""
    found = {}
    for path in saves.rglob("*"):
        relative = path.relative_to(saves)
        if not path.is_dir() and not any(is_draft(Path(part)) for part in relative.parts):
            facts = path.stat()
            found[str(relative)] = facts.st_ino, facts.st_size, facts.st_mtime_ns
    return found


class Stale:
    """A job of a worker a node, whose first one is paused."""

    def __init__(self, zygote: Zygote, data: Path, directory: Path) -> None:
        self._where: dict[str, Any] = {"zygote": zygote, "data": data, "directory": directory}
        self._directory = directory

    def run(self, spec: JobSpec, saves: Path) -> tuple[Outcome, str | None, Listing, Listing]:
        """Run it; also what its late call raised, and all that was published before and after."""
        with started(spec, **self._where) as launchers:
            events, seen = Tail(self._directory / EVENTS_FILE), list[dict[str, Any]]()

            def wait_for(kind: str, **wanted: object) -> dict[str, Any]:
                deadline = Deadline(LIMIT_S)
                while True:
                    seen.extend(events.new())
                    for one in seen:
                        if one["kind"] == kind and wanted.items() <= one.items():
                            return one
                    assert deadline.left_s(), self._output[-3000:]
                    time.sleep(0.02)  # the file is all that a running job shows

            wait_for("stops", there=True)
            # The guardian first: it would end an agent that stands still.
            guardian, agent, worker = processes_of(self._directory, node=0)
            for pid in (guardian, agent):
                os.kill(pid, signal.SIGSTOP)
            codes = [launcher.wait(LIMIT_S) for launcher in launchers[1:]]
            assert codes == [0] * (spec.nodes - 1), self._output[-3000:]
            before = published(saves)
            os.kill(worker, signal.SIGCONT)
            error = wait_for("tried")["error"]
            for pid in (guardian, agent):
                os.kill(pid, signal.SIGCONT)
            assert left_alive((worker, agent), limit_s=LIMIT_S) == ()
            assert launchers[0].wait(LIMIT_S) != 0
        run = Outcome(
            spec=spec, directory=self._directory, returncode=0, output=self._output, seconds=0
        )
        return run, error, before, published(saves)

    @property
    def _output(self) -> str:
        return (self._directory / "output").read_text()
