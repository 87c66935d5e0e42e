"""Calls of a script map no memory, however deep they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

CALLS = 200
# At each depth the faults of calls of a function whose frame is larger than that of a depth.
SCRIPT = f"""
import resource
names = ", ".join(f"name{{number}}=0" for number in range(60))
exec(f"def leaf({{names}}): pass")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def at(depth):
    if depth:
        return at(depth - 1)
    before = faults()
    for _ in range({CALLS}):
        leaf()
    return faults() - before
print(sum(at(depth) >= {CALLS} for depth in range(400)))
"""


@pytest.mark.parametrize("runner", [(), ("-m", "elaswave_plugin.trainer.script_run")])
def test_no_call_of_a_script_maps_memory(tmp_path: Path, runner: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *runner, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # Without us there are such depths, which shows that they are met.
    assert (int(done.stdout) > 0) is (not runner), done.stdout
