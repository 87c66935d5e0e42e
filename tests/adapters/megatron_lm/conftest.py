"""A zygote with Megatron-LM imported, and each reference run of its scripts once."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.energy_monitor import EnergyMonitor
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from tests.adapters.megatron_lm.harness import PRELOAD, ScriptSpec, lay_out
from tests.faults.harness import ROOT, Outcome, Zygote
from tests.session import Run, Zygotes, each_once

Launch = Callable[[ScriptSpec], Outcome]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a copy of the repository."""
    return lay_out(tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="session")
def zygote(script: Path, zygotes: Zygotes) -> Zygote:
    """A process that has imported Megatron-LM."""
    return zygotes(PRELOAD, path=(ROOT, script.parent))


@pytest.fixture(scope="session")
def run(script: Path, zygote: Zygote, run: Run) -> Run:
    """Launch a specification of a script of the copy."""
    return lambda spec, other=None: run(
        replace(spec, script=str(script.parent / spec.script)), other or zygote
    )


@pytest.fixture(scope="session")
def run_changed(run: Launch, script: Path) -> Launch:
    """Launch the script with a model that options of changed_model.py change."""
    copied = shutil.copy(Path(__file__).with_name("changed_model.py"), script.parent)
    return lambda spec: run(replace(spec, script=str(copied)))


@pytest.fixture(scope="session")
def reference(run: Launch) -> Launch:
    """The undisturbed run of a specification, made once."""
    once = each_once(run)
    return lambda spec: once(spec.undisturbed())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> RerunStateMachine:
    """Megatron-Core's rerun machine, as the scripts have it by default."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(
        "elaswave_plugin.adapters.megatron_lm.side_state.get_rerun_state_machine", lambda: machine
    )
    return machine


@pytest.fixture
def args(
    monkeypatch: pytest.MonkeyPatch, machine: RerunStateMachine
) -> Iterator[argparse.Namespace]:
    """Batches of 4 to 12 samples on two replicas; a stand-in for the package with the arguments."""
    given = argparse.Namespace(
        rampup_batch_size=["4", "4", "16"], global_batch_size=12, consumed_train_samples=0
    )
    training = SimpleNamespace(
        get_args=lambda: given,
        get_timers=lambda: SimpleNamespace(_timers={}),
        _TRAIN_START_TIME=0.0,
        _LEGACY_TRAIN_START_TIME=0.0,
    )
    counter = EnergyMonitor()
    training.get_energy_monitor = lambda: counter
    for name in ("training", "training.training", "training.global_vars"):
        monkeypatch.setitem(sys.modules, f"megatron.{name}", training)
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, [4, 4, 16], 12, 1, 2)
    yield given
    calculator.unset_num_microbatches_calculator()
