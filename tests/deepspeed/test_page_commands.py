"""The commands by which pages train examples on DeepSpeed, as printed; a worker is killed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proofs import Kind, Promise, proves
from tests.tidy.page_commands import ROOT, commands_of

pytest.importorskip("accelerate")
pytest.importorskip("trl")

PAGES = ("huggingface.md", "getting_started.md")
COMMANDS = [
    command
    for name in PAGES
    for command in commands_of(ROOT / "docs" / name)
    if re.search(r"elaswave run .* examples/\w+\.py ", command)
]
BIN = Path(sys.executable).parent


def place_of(folder: Path) -> Path:
    """Make a folder that has what a reader of the page has in a checkout."""
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    page = (ROOT / "docs" / "huggingface.md").read_text()
    (folder / "hf.json").write_text(re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)[1])
    return folder


def kill_slot_0(directory: str, place: Path) -> None:
    """Kill the worker that `elaswave status` names, as the page has it."""
    words = [str(BIN / "elaswave"), "status", directory, "--json"]
    told = subprocess.run(words, cwd=place, capture_output=True, timeout=60, check=True)
    workers = json.loads(told.stdout)["workers"]
    os.kill(next(one["trainer_pid"] for one in workers if one["slot"] == 0), signal.SIGKILL)


def test_each_example_is_printed() -> None:
    scripts = {re.search(r"examples/(\w+)\.py", one)[1] for one in COMMANDS}
    assert scripts == {"train_hf", "train_trl", "train_accelerate", "train_deepspeed"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@proves(Kind.KILL, Promise.GOES_ON, victim="0")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: re.search(r"(\w+)\.py", one)[1])
def test_the_page_s_command_trains(command: str, tmp_path: Path) -> None:
    place = place_of(tmp_path)
    words = shlex.split(command)
    directory = words[words.index("--dir") + 1]
    path = f"{BIN}:{os.environ['PATH']}"
    output = []
    with subprocess.Popen(
        ["bash", "-c", f"exec env {command}"],
        cwd=place,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        for line in job.stdout:
            output.append(line)
            if "loss" in line and "elaswave" not in line and directory:
                kill_slot_0(directory, place)
                directory = ""
    text = "".join(output)
    assert job.returncode == 0, text[-4000:]
    assert text.count("worker 0 (node 0) exited: killed by SIGKILL") == 1
    assert "1 loss survived" in text and "0 lost, 0 repeated" in text
    if "wandb" in command:
        (sync,) = re.findall(r"^wandb sync (.*)$", text, re.MULTILINE)
        assert all((Path(one) / "files").is_dir() for one in sync.split())
