"""Rehearses scripts with the zygotes of the session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.harness import PRELOAD as ENGINE_PRELOAD
from tests.deepspeed.harness import EngineSpec
from tests.faults.harness import SABOTAGED, JobSpec, Zygote
from tests.session import Zygotes

LIMIT_S = 520.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A rehearsal that is over."""

    exit_code: int
    output: str
    verdict: dict[str, Any]

    @property
    def first(self) -> dict[str, Any]:
        """The first difference of the first run that has one."""
        found = (run["first_difference"] for run in self.verdict["runs"])
        return next((one for one in found if one), {})

    @property
    def named(self) -> str:
        """The text about it, with the lines of the script and what else differs."""
        said = (run["first_difference_said"] for run in self.verdict["runs"])
        first = self.first
        return "\n".join([next(filter(None, said), ""), *first["where"], *first["also_differ"]])


Rehearse = Callable[..., Rehearsed]


def rehearsed(command: list[str], *options: str, folder: Path) -> Rehearsed:
    """Run `elaswave rehearse` in a folder of its own."""
    result = folder / "verdict.json"
    (folder / "here").mkdir(exist_ok=True)
    words = [sys.executable, "-m", "elaswave_plugin.cli.main", "rehearse", "--json", str(result)]
    ended = subprocess.run(
        [*words, *options, *command],
        cwd=folder / "here",
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONWARNINGS": "ignore", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    verdict = json.loads(result.read_text()) if result.exists() else {}
    output = ended.stdout + ended.stderr
    return Rehearsed(exit_code=ended.returncode, output=output, verdict=verdict)


@pytest.fixture
def rehearse(zygote: Zygote, data: Path, tmp_path: Path) -> Rehearse:
    """Rehearse a specification; ``runs``: only these."""
    return rehearsing(zygote, data, tmp_path)


@pytest.fixture
def rehearse_engine(zygotes: Zygotes, tmp_path: Path) -> Rehearse:
    """The same with DeepSpeed."""
    return rehearsing(zygotes(ENGINE_PRELOAD), tmp_path, tmp_path)


def rehearsing(zygote: Zygote, data: Path, folder: Path) -> Rehearse:
    """Rehearses specifications with a zygote; ``data`` as the specification has it."""

    def run(spec: JobSpec, *options: str, runs: tuple[str, ...] = ()) -> Rehearsed:
        command = [sys.executable, "-m", "elaswave_plugin.cli.main", "run"]
        command += ["--zygote", str(zygote.socket), "--nproc-per-node", str(spec.nproc)]
        if spec.sabotage:
            command += [str(SABOTAGED), spec.sabotage]
        where = folder if isinstance(spec, EngineSpec) else folder / "unused"
        arguments = spec.arguments(data, where)
        if isinstance(spec, EngineSpec):
            path = where / "deepspeed.json"
            config = json.loads(path.read_text())
            del config["elaswave"]["respawn"]
            path.write_text(json.dumps(config))
        words = [*command, spec.script, *(one for one in arguments if "respawn" not in one)]
        only = [word for name in runs for word in ("--run", name)]
        return rehearsed(words, *only, *options, folder=folder)

    return run
