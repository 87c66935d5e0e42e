"""The demo's processes end with it, whenever it is told to end."""

import subprocess
import sys
from pathlib import Path

# Told in the middle of the fork, where Python drops what a handler raises.
TOLD = """
import os, signal, sys
from pathlib import Path
from elaswave_plugin.demo.jobs import running
from elaswave_plugin.cli.main import signals_unwind
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
with signals_unwind(), running(sleeping, Path(sys.argv[1])) as process:
    print("went on", flush=True)
    process.wait(20)
"""


def test_a_signal_in_the_middle_of_a_start_ends_both(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TOLD, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
