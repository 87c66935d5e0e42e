"""Launches of Megatron-LM's pretrain_gpt.py, and what it prints."""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Self

import pytest
from packaging.specifiers import SpecifierSet

from elaswave_plugin.adapters.megatron.compat.versions import SCRIPTS
from tests.faults.harness import JobSpec, Outcome

REPOSITORY = os.environ.get("MEGATRON_LM_PATH", "")
# `make megatron-lm` runs what has it; without a checkout it is skipped (tests/conftest.py).
needs_repository = pytest.mark.checkout
# Whether the records of Megatron-LM's scripts are for the installed megatron-core.
SCRIPTS_FIT = SpecifierSet(SCRIPTS).contains(version("megatron-core"))
needs_scripts = pytest.mark.skipif(
    not SCRIPTS_FIT, reason="Megatron-LM's scripts are carried with an earlier megatron-core only"
)
PRELOAD = ("torch", "numpy", "pydantic", "tests.adapters.megatron_lm.preload")
# Beside megatron/core, which the wheel has, with its C++ helpers built.
_PACKAGES = ("training", "legacy", "post_training", "rl")

# The real model in small; on CPU nothing is fused, and the layers are Megatron-Core's own.
MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "126"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", "0"),
    *("--transformer-impl", "local", "--use-cpu-initialization"),
    *("--distributed-backend", "gloo"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    "--no-rope-fusion",
)
TRAINING = (
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--clip-grad", "1.0"),
    *("--weight-decay", "0.01", "--log-interval", "1", "--eval-interval", "3"),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--ddp-bucket-size", "30000"),
)
NO_EVALUATION = ("--eval-iters", "0", "--split", "100,0,0")
EVALUATION = ("--eval-iters", "2", "--split", "80,10,10")
TP2_PP2 = (
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    "--sequence-parallel",
)


_NUMBER = r"[-+.\dEe]+"
_RESULTS = re.compile(
    r"iteration +\d+/ +\d+ \| consumed samples.*?nan iterations: +\d+"
    rf"|(?:validation|test)? ?loss at iteration .*?value: {_NUMBER} \| lm loss PPL: {_NUMBER}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec(JobSpec):
    """One launch: DP4 with the distributed optimizer and both overlaps, dropout on."""

    steps: int = 6
    # Samples of each step, where they are not alike.
    ramp: tuple[int, ...] = ()
    global_batch: int = 8
    options: tuple[str, ...] = NO_EVALUATION
    # Of MODEL and TRAINING.
    without: tuple[str, ...] = ()
    script: str = "pretrain_gpt.py"
    elastic: bool = True

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its zygote has imported."""
        return PRELOAD

    def undisturbed(self) -> Self:
        """The same job without faults, departures and returns."""
        return replace(self, kills=(), changes=(), awaits=(), respawn=0)

    @property
    def batches(self) -> Sequence[int]:
        """Samples of each step."""
        return self.ramp or self.steps * [self.global_batch]

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """The script's arguments; where the options name a folder {data}, this is it."""
        ours = [
            "--elaswave",
            f"--elaswave-dir={directory}",
            f"--elaswave-consistency={self.consistency}",
            f"--elaswave-dump-state={self.dump}",
            f"--elaswave-respawn={self.respawn}",
            *(f"--elaswave-kill={kill}" for kill in self.kills),
            *(f"--elaswave-change={change}" for change in self.changes),
        ]
        return [
            *(word for word in (*MODEL, *TRAINING) if word not in self.without),
            *("--micro-batch-size", "1", "--global-batch-size", str(self.global_batch)),
            *(
                ("--train-samples", str(sum(self.ramp)))
                if self.ramp
                else ("--train-iters", str(self.steps))
            ),
            *(option.replace("{data}", str(data)) for option in self.options),
            *(ours if self.elastic else ()),
        ]


def lay_out(folder: Path) -> Path:
    """Copy the repository's scripts and packages, but for megatron/core; returns the script."""
    source = Path(REPOSITORY)
    for script in source.glob("*.py"):
        shutil.copy(script, folder)
    for package in _PACKAGES:
        shutil.copytree(source / "megatron" / package, folder / "megatron" / package)
    return folder / "pretrain_gpt.py"


def printed(run: Outcome) -> list[str]:
    """Return what the script prints of iterations and evaluations, without times of the clock."""
    return printed_in(run.output)


def printed_in(output: str) -> list[str]:
    """The same of the whole output of a run.

    Workers write to one file, so that a line may go on with what another one prints.
    """
    found = re.findall(_RESULTS, output)
    assert found, output[-4000:]
    return [re.sub(r"elapsed time[^|]*\| ", "", text) for text in found]
