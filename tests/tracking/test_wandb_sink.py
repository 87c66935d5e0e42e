"""W&B offline, for real: one run id over two owners, and no process left by a killed owner."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.idle import Deadline
from tests.tracking.wandb_files import history, run_ids

pytest.importorskip("wandb")

LIMIT_S = 60.0
OWNER = """
import json, sys
from pathlib import Path
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.tracking.tracker import Tracker
folder, first, last, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = ElasticConfig(wandb="offline", wandb_project="tests", dir=folder)
tracker = Tracker(config, "one-run", True)
for step in range(first, last + 1):
    tracker.event("recovered", step, {"mttr_s": 0.5})
    tracker.step(step, {"train/loss": float(step)})
print("ready", flush=True)
if end == "stay":
    sys.stdin.read()
assert tracker.close(), "left after the limit"
assert tracker.problem is None, tracker.problem
"""


def owner(folder: Path, first: int, last: int, end: str) -> subprocess.Popen[bytes]:
    arguments = [str(folder), str(first), str(last), end]
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = Deadline(LIMIT_S)
    while not condition():
        assert deadline.left_s(), f"no {what} within {LIMIT_S:g} s"
        time.sleep(0.02)


def test_wandb_run_survives_the_kill_of_its_owner_and_nothing_stays_behind(tmp_path: Path) -> None:
    lost = owner(tmp_path, 0, 4, "stay")
    children: list[psutil.Process] = []
    try:
        assert lost.stdout is not None and lost.stdout.readline() == b"ready\n"
        wait_for(lambda: [len(rows) for rows in history(tmp_path).values()] == [5], "five rows")
        children = psutil.Process(lost.pid).children(recursive=True)
        assert children, "W&B's service process should be a child of the owner"
    finally:
        lost.kill()
        lost.wait(LIMIT_S)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [], "W&B's service process outlived its owner"

    heir = owner(tmp_path, 3, 7, "close")  # steps 3 and 4 are redone
    output, said = heir.communicate(timeout=LIMIT_S)
    assert (output, heir.returncode) == (b"ready\n", 0)
    folders = " ".join(str(one) for one in sorted(tmp_path.glob("wandb/offline-run-*")))
    told = f"elaswave: W&B run one-run is offline; upload it with\nwandb sync {folders}\n"
    assert said.decode().count(told) == 1
    first, second = history(tmp_path).values()
    assert [row["_step"] for row in first] == [0, 1, 2, 3, 4]
    assert [row["_step"] for row in second] == [5, 6, 7]
    assert [row["train/loss"] for row in second] == [5.0, 6.0, 7.0]
    assert all(row["recovered/mttr_s"] == 0.5 for row in second)
    assert run_ids(tmp_path) == {"one-run"}


@pytest.mark.parametrize(
    ("mode", "environment", "chosen"),
    [
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("online", {}, "online"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"NETRC": "/nonexistent"}, "offline"),
    ],
)
def test_wandb_mode_is_online_only_with_a_key(mode: Any, environment: Any, chosen: str) -> None:
    from elaswave_plugin.tracking.sinks import chosen_mode

    assert chosen_mode(mode, environment) == chosen


def test_wandb_key_in_netrc_is_found(tmp_path: Path) -> None:
    from elaswave_plugin.tracking.sinks import has_key

    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_key({"HOME": str(tmp_path)})
    assert not has_key({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://other.example"})
