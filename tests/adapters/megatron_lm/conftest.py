"""One zygote with Megatron-LM imported, and each reference run once."""

import argparse
import os
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
from tests.convoys import convoy as convoy
from tests.convoys import played as played
from tests.faults.harness import ROOT, Outcome, Zygote, launch

Launch = Callable[[ScriptSpec], Outcome]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a copy of the repository."""
    return lay_out(tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="session")
def zygote(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that has imported Megatron-LM."""
    paths = [str(ROOT), str(script.parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        running = Zygote(tmp_path_factory.mktemp("zygote"), PRELOAD)
        yield running
        running.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what runs leave to each other."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def run(
    script: Path, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch a specification in a directory of its own."""

    def launched(spec: ScriptSpec) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        path = str(script.parent / spec.script)
        return launch(replace(spec, script=path), zygote=zygote, data=data, directory=folder)

    return launched


@pytest.fixture(scope="session")
def run_changed(run: Launch, script: Path) -> Launch:
    """Launch the script with a model that options of changed_model.py change."""
    copied = shutil.copy(Path(__file__).with_name("changed_model.py"), script.parent)
    return lambda spec: run(replace(spec, script=str(copied)))


@pytest.fixture(scope="session")
def reference(run: Launch) -> Launch:
    """The undisturbed run of a specification, made once."""
    made: dict[ScriptSpec, Outcome] = {}

    def undisturbed(spec: ScriptSpec) -> Outcome:
        spec = replace(spec, kills=(), changes=(), awaits=(), respawn=0)
        if spec not in made:
            made[spec] = run(spec)
            assert made[spec].returncode == 0, made[spec].output[-4000:]
        return made[spec]

    return undisturbed


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
