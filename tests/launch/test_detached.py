"""A script in which nothing attaches: its launcher says so once, and runs it to its end."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.jobs import LAUNCH, environment
from tests.idle import Deadline
from tests.launch.test_torchrun import torchrun
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves

WAIT_S = 60.0
TRAINS = "trains without elaswave, and no loss will be survived"
ENDED = "has ended, and elaswave never attached"
STEP = """
import torch
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
def step():
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""
# Trains on until it is let go.
WAITS = f"""
import os, time
from pathlib import Path
{STEP}
while not Path("go").exists():
    step()
    Path(f"stepped-{{os.environ['RANK']}}").touch()
    time.sleep(0.01)
"""
# A trainer's own child trains, and the trainer does not.
FORKS = f"""
import os, sys
{STEP}
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
step()
"""
ELASWAVE_RUN = (sys.executable, "-c", LAUNCH, "--nproc-per-node=2")


def launch(folder: Path, script: str, *command: str) -> "subprocess.Popen[str]":
    """Start a launcher in a folder of its own; its errors go to a file there."""
    (folder / "s.py").write_text(script)
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [*command, "s.py"], cwd=folder, env=environment(), stderr=errors, text=True
        )


def said(folder: Path) -> list[str]:
    """Return what the launcher and its agent have said."""
    lines = (folder / "errors").read_text().splitlines()
    return [line for line in lines if line.startswith("elaswave: worker")]


@proves(Kind.NOT_ATTACHED, Promise.NAMED)
@pytest.mark.parametrize(
    "command",
    [
        ELASWAVE_RUN,
        (*ELASWAVE_RUN, "--preload=torch"),
        (*torchrun("-m", "elaswave_plugin.run", nproc=2, port=0),),
    ],
    ids=["elaswave run", "from a zygote", "torchrun"],
)
def test_the_first_step_of_a_script_that_did_not_join_is_told_at_once(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    command = tuple(word.replace("port=0", f"port={free_port()}") for word in command)
    process = launch(tmp_path, WAITS, *command)
    try:
        deadline = Deadline(WAIT_S)
        while not said(tmp_path) or len(list(tmp_path.glob("stepped-*"))) < 2:
            assert deadline.left_s() and process.poll() is None, said(tmp_path)
            time.sleep(0.01)  # the files are all that shows it
    finally:
        (tmp_path / "go").touch()
        code = process.wait(WAIT_S)
    (line,) = said(tmp_path)
    assert f"{TRAINS}: the script uses neither Megatron-Core nor DeepSpeed" in line
    assert code == 0


@proves(Kind.NOT_ATTACHED, Promise.NAMED)
@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("", "the script imported no torch"),
        ("import torch", "the script uses neither Megatron-Core nor DeepSpeed"),
        (FORKS, "the script uses neither Megatron-Core nor DeepSpeed"),
        ("import os, torch; os.environ.clear()", "the script uses neither Megatron-Core nor"),
        (
            "import os, megatron.core; os.environ['ELASWAVE'] = '1'",
            "--elaswave or ELASWAVE=1 is given, and the script called neither",
        ),
    ],
    ids=["no torch", "no step", "a step of a child", "no environment", "no world"],
)
def test_a_script_that_ends_without_having_joined_is_told(
    tmp_path: Path, script: str, missing: str
) -> None:
    process = launch(tmp_path, script, *ELASWAVE_RUN)
    assert process.wait(WAIT_S) == 0
    (line,) = said(tmp_path)
    assert f"{ENDED}: {missing}" in line


@proves(Kind.KILL, Promise.NAMED)
def test_a_loss_in_a_script_that_did_not_join_ends_with_what_it_lacks(tmp_path: Path) -> None:
    dies = f"""{WAITS}
    if os.environ["RANK"] == "1" and Path("die").exists():
        os.kill(os.getpid(), 9)
"""
    process = launch(tmp_path, dies, *ELASWAVE_RUN)
    deadline = Deadline(WAIT_S)
    while not said(tmp_path):
        assert deadline.left_s() and process.poll() is None
        time.sleep(0.01)  # the file is all that shows it
    (tmp_path / "die").touch()
    assert process.wait(WAIT_S) == 75
    (line,) = [one for one in (tmp_path / "errors").read_text().splitlines() if "stops" in one]
    lacks = "the script uses neither Megatron-Core nor DeepSpeed"
    assert f"killed by SIGKILL; elaswave is not attached, so the job stops: {lacks}" in line


@proves(Kind.RAISE, Promise.NAMED)
def test_a_script_that_fails_says_what_it_has_to_say_itself(tmp_path: Path) -> None:
    process = launch(tmp_path, "import torch, sys; sys.exit(7)", *ELASWAVE_RUN)
    assert process.wait(WAIT_S) == 7
    assert said(tmp_path) == []
