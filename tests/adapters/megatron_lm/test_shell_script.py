"""The example's launch script of Megatron-LM's pretrain_gpt.py, by the line that pages print."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.harness import needs_repository
from tests.proofs import Kind, Promise, proves
from tests.tidy.page_commands import ROOT, commands_of

pytestmark = [needs_repository, pytest.mark.timeout(600), pytest.mark.slow]
PAGE = ROOT / "docs" / "megatron_lm.md"


@proves(Kind.KILL, Promise.GOES_ON, victim="5", moment="10:backward")
def test_the_line_of_the_page_survives_its_kill(script: Path, tmp_path: Path) -> None:
    (command,) = (one for one in commands_of(PAGE) if "pretrain_gpt_elastic.sh" in one)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", *shlex.split(command.partition(" ")[2])],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "MEGATRON_LM_PATH": str(script.parent)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert said.count("worker 5 (node 0) exited: killed by SIGKILL") == 1
    assert "20 steps completed, 1 loss survived" in said
