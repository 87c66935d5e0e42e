"""The kit's runner, page and command: budgets hold, nothing is left, one JSON and one page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu.items import items
from benchmarks.gpu.runner import ROOT
from tests.gpu.kit_items import PIDS
from tests.idle import completed

LIST = ("--items", "tests.gpu.kit_items:items")
TOTAL_S = 25 * 60


def kit(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), *options]
    env = {**os.environ, PIDS: str(folder.parent / "pids"), "CUDA_VISIBLE_DEVICES": ""}
    return completed(command, 100, cwd=ROOT, env=env)


def results(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "result.json").read_text())
    return {one["name"]: one for one in found["items"]}


def test_each_item_ends_in_its_way_and_leaves_nothing(tmp_path: Path) -> None:
    done = kit(tmp_path / "out", *LIST)
    assert done.returncode == 1, done.stderr
    found = results(tmp_path / "out")
    statuses = {name: one["status"] for name, one in found.items()}
    assert statuses == {
        "good": "passed",
        "device": "not run",
        "many": "not run",
        "slow": "timed out",
        "bad": "failed",
        "raises": "failed",
        "idle": "failed",
        "absent": "not run",
        "leaves": "passed",
    }
    assert found["good"]["figures"] == {"answer": 42}
    assert found["device"]["reason"] == found["many"]["reason"] == "no CUDA device on this machine"
    assert found["slow"]["lines"] == ["what it found before: ok"]
    assert 4 <= found["slow"]["seconds"] < 14
    assert found["bad"]["reason"] == "two is three"
    assert found["raises"]["reason"] == "exit code 1: RuntimeError: the device is on fire"
    assert found["idle"]["reason"] == "it checked nothing"
    assert found["absent"]["reason"] == "its library is not installed"
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    page = (tmp_path / "out" / "page.md").read_text()
    assert page in done.stdout
    assert "2 passed, 3 failed, 1 timed out, 3 not run" in page
    assert "| Slow | timed out |" in page and "exit code 1: RuntimeError" in page
    assert "stood in" not in page


def test_a_stand_in_is_named_on_the_page_and_has_two_devices(tmp_path: Path) -> None:
    done = kit(tmp_path / "out", *LIST, "--stand-ins", "--only", "device", "--only", "many")
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    assert found["device"]["lines"] == ["it computes on stand-in of 2: ok"]
    assert found["device"]["device"] == "stand-in"
    assert found["many"]["reason"] == "needs 99 CUDA devices, this machine has 2"
    page = (tmp_path / "out" / "page.md").read_text()
    assert "**The CPU has stood in for a GPU: nothing here is a result of a GPU.**" in page


def test_the_whole_budget_ends_what_runs_and_what_comes_is_not_run(tmp_path: Path) -> None:
    only = [word for name in ("slow", "good") for word in ("--only", name)]
    done = kit(tmp_path / "out", *LIST, *only, "--minutes", "0.03")
    # 1.8 s: the good one, first in the list, may end in them; the slow one is not begun or ended.
    assert done.returncode in (0, 1)
    found = results(tmp_path / "out")
    assert found["slow"]["status"] in ("not run", "timed out")
    assert found["slow"]["seconds"] < 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--only", "nobody"), "--only is 'nobody', wanted one of machine, kernels"),
        (("--minutes", "0"), "--minutes is 0, wanted more than 0"),
        (("--out", "/dev/null/x"), "--out is '/dev/null/x', which cannot be written"),
        (("--nonsense",), "No such option"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    done = kit(tmp_path / "out", *options)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_items_are_25_minutes_and_named_once() -> None:
    there = items()
    assert sum(one.budget_s for one in there) <= TOTAL_S
    assert len({one.name for one in there}) == len(there)
    assert there[0].gpus == 0


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a CUDA device")
def test_without_a_gpu_what_needs_one_is_not_run(tmp_path: Path) -> None:
    done = kit(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    assert found.pop("machine")["status"] == "passed"
    assert {(one["status"], one["reason"]) for one in found.values()} == {
        ("not run", "no CUDA device on this machine")
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["kernels", "nccl", "seals", "layers"])
def test_an_item_s_logic_on_a_stand_in(tmp_path: Path, name: str) -> None:
    """Those without jobs; the jobs' are marked slow below."""
    done = kit(tmp_path / "out", "--stand-ins", "--only", name)
    found = results(tmp_path / "out")[name]
    wanted = "not run" if name == "layers" else "passed"
    assert (found["status"], done.returncode) == (wanted, 0), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [one.name for one in items() if one.place.split(":")[1] in ("survive", "measure")],
)
def test_an_item_of_jobs_on_a_stand_in(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--stand-ins", "--only", name]
    out = tmp_path / "out"
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, timeout=500)
    assert done.returncode == 0, results(out)[name]
