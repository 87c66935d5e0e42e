"""Warnings of libraries are a few lines a node; those of the script come from every worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.trainer.script_run import MOST_LINES
from tests.agent.jobs import TRAINER, Job, environment

NOISY = """
import warnings
def warn(text):
    warnings.warn(f"library {text}\\nin two lines", UserWarning)
    warnings.warn("always the same")
warn("at import")
"""
SCRIPT = f"""
import runpy, warnings
import noisy
for number in range(12):
    noisy.warn(number)
warnings.warn("of the script")
runpy.run_path({str(TRAINER)!r}, run_name="__main__")
"""


@pytest.mark.parametrize("how", ["exec", "zygote", "asked"])
def test_a_node_shows_a_few_lines_of_what_its_libraries_warn_of(tmp_path: Path, how: str) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "noisy.py").write_text(NOISY)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {"PYTHONPATH": environment()["PYTHONPATH"] + f":{library}"}
    env |= {"PYTHONWARNINGS": "default"} if how == "asked" else {}
    options = ("--preload=noisy",) if how == "zygote" else ()
    with Job(tmp_path, 3, *options, TINY_RESPAWN="1", **env) as job:
        job.launch("--nproc-per-node=3", str(tmp_path / "script.py"))
        job.joined()
        job.kill(0)
        job.all("detached", [0])
        assert job.finish(range(1, 3)) in (0, 1)
    lines = job.output().splitlines()
    library_lines = [line for line in lines if "noisy.py" in line or "of libraries" in line]
    if how == "asked":
        assert len(library_lines) > 20
    else:
        assert len(library_lines) == MOST_LINES + 1, library_lines
        assert library_lines[-1].endswith("PYTHONWARNINGS=default does")
    assert sum("of the script" in line and "UserWarning" in line for line in lines) >= 3


def test_without_a_job_nothing_is_changed() -> None:
    code = "import warnings, elaswave_plugin; warnings.warn('x'); print(warnings.showwarning)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "UserWarning: x" in done.stderr and "_Few" not in done.stdout
