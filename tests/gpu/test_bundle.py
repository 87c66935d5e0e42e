"""The kit's bundle: it has all that setup.py asks for but torch, and says what is wrong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import bundle
from benchmarks.gpu.runner import ROOT


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list | tuple)
    return {Requirement(one).name for one in requirements}


def test_all_that_the_package_asks_for_is_in_it_but_torch() -> None:
    calls = [
        one
        for one in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(one, ast.keyword)
    ]
    (wanted,) = (ast.literal_eval(one.value) for one in calls if one.arg == "install_requires")
    assert "torch" in names(wanted)
    assert names(wanted) - {"torch"} <= names(bundle.FREE_OF_TORCH)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    command = [sys.executable, "-m", "benchmarks.gpu.bundle", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "which is not empty; name a new folder" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("script", [bundle.INSTALL, bundle.KIT])
def test_its_scripts_are_scripts(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(script)
    assert subprocess.run(["sh", "-n", str(path)], timeout=20).returncode == 0
