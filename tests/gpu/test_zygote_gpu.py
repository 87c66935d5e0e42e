"""A zygote beside a real GPU: imports may ask for it, and may not initialise it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.agent.jobs import environment

pytestmark = [
    pytest.mark.gpu,
    # device_count() asks NVML and leaves CUDA uninitialised: other tests fork from this process.
    pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [("import torch; torch.cuda.is_available()", False), ("import torch; torch.cuda.init()", True)],
)
def test_only_an_initialised_gpu_is_refused(tmp_path: Path, code: str, is_refused: bool) -> None:
    (tmp_path / "first.py").write_text(f"{code}\n")
    imported = "from elaswave_plugin.trainer.zygote import _preload"
    done = subprocess.run(
        [sys.executable, "-c", f"{imported}\nprint(_preload(['first']))"],
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout.splitlines()[-1]
    assert said == "None" if not is_refused else "initialised CUDA" in said, done.stderr
