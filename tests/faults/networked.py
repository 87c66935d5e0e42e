"""Jobs whose nodes are network namespaces: launchers started there, and what they write."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.agent.jobs import LAUNCH, environment
from tests.faults.harness import SABOTAGED, JobSpec, left_alive
from tests.faults.network import Network
from tests.idle import Deadline

LIMIT_S = 120.0


def launched(
    network: Network,
    node: int,
    spec: JobSpec,
    arguments: list[str],
    directory: Path,
    *options: str,
    sabotage: str = "",
) -> "subprocess.Popen[bytes]":
    """Start the launcher of a node; its output goes to DIRECTORY/output."""
    workers = spec.nproc // spec.nodes
    place = [f"--node-rank={node}", f"--nnodes={spec.nodes}", f"--nproc-per-node={workers}"]
    meeting = [f"--master-addr={network.address(0)}", "--master-port=29500", f"--dir={directory}"]
    command = [sys.executable, "-W", "ignore", "-c", LAUNCH, *place, *options, *meeting]
    with (directory / "output").open("ab") as output:
        return subprocess.Popen(
            [*network.nodes[node], *command, str(SABOTAGED), sabotage, spec.script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment(),
        )


class Seen:
    """The events of a running job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events, self._seen = Tail(directory / EVENTS_FILE), list[dict[str, Any]]()

    def wait_for(self, kind: str, **wanted: object) -> dict[str, Any]:
        """Return the first event of a kind with these fields."""
        deadline = Deadline(LIMIT_S)
        while True:
            self._seen.extend(self._events.new())
            for one in self._seen:
                if one["kind"] == kind and wanted.items() <= one.items():
                    return one
            assert deadline.left_s(), (self._directory / "output").read_text()[-3000:]
            time.sleep(0.02)  # the file is all that a running job shows


def end(launcher: "subprocess.Popen[bytes]") -> None:
    """End a launcher, and its processes with it."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(20)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait(20)
    assert left_alive((launcher.pid,), limit_s=0.0) == ()
