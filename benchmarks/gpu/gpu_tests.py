"""Runs the tests that are marked gpu and says what became of them."""

import re
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.runner import ROOT

FILES = (
    "tests/communicator/test_nccl_gpu.py",
    "tests/gpu",
    "tests/faults/test_gpu.py",
    "tests/faults/test_fused_adam.py",
    "tests/faults/test_te_layers.py",
)
SCRIPTS = ("tests/deepspeed/test_gpu.py", "tests/adapters/megatron_lm/test_gpu.py")
SUMMARY = re.compile(r"^(?:FAILED|ERROR) .*|^=*\s*\d+ .*in [\d.]+ ?s.*$", re.MULTILINE)


def run_marked(device: Device, notes: Notes, files: Sequence[str] = FILES) -> None:
    """Run pytest -m gpu; on a stand-in all of them have to be skipped with a reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rfEs", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    for line in SUMMARY.findall(done.stdout):
        notes.say(line.strip("= "))
    passed = re.search(r"(\d+) passed", done.stdout)
    skipped = re.search(r"(\d+) skipped", done.stdout)
    notes.figure("passed", int(passed[1]) if passed else 0)
    notes.figure("skipped", int(skipped[1]) if skipped else 0)
    if device.is_stand_in:
        notes.check("without a GPU they are skipped", bool(skipped) and done.returncode in (0, 5))
    else:
        notes.check("they pass", bool(passed) and done.returncode == 0)
