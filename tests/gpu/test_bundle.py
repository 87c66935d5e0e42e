"""The kit's bundle: it has all that setup.py asks for but torch, and says what is wrong."""

import ast
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import bundle
from benchmarks.gpu.runner import ROOT
from tests.idle import completed


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
    done = completed(command, 100, cwd=ROOT)
    assert done.returncode == 2
    assert "which is not empty; name a new folder" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("script", [bundle.INSTALL, bundle.KIT])
def test_its_scripts_are_scripts(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(script)
    assert subprocess.run(["sh", "-n", str(path)], timeout=20).returncode == 0


def test_the_torch_of_a_virtual_environment_is_seen(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], timeout=60)
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    torch = packages / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.touch()
    with tarfile.open(tmp_path / "checkout.tar.gz", "w:gz"):
        pass
    before, _, _ = bundle.INSTALL.partition("\ninstall() {")
    script = tmp_path / "install.sh"
    script.write_text(f'{before}\n"$here/venv/bin/python" -c "import torch; print(torch.__file__)"')
    command = ["sh", str(script), str(tmp_path / "other" / "bin" / "python")]
    done = completed(command, 100)
    assert (done.returncode, done.stdout) == (0, f"{torch}\n"), done.stderr
