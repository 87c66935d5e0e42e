"""The same job under real launchers: torchrun, and DeepSpeed's own."""

import sys
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.test_pipeline import check_pipeline
from tests.deepspeed.test_pipeline_join import check_back, spec_of
from tests.faults.foreign_launchers import TORCHRUN, run_under
from tests.faults.harness import Outcome
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
pytestmark = pytest.mark.timeout(240)


def launched(command: tuple[str, ...], spec: EngineSpec, directory: Path) -> Outcome:
    return run_under(command, spec, data=directory, directory=directory, DS_ACCELERATOR="cpu")


@proves(Kind.KILL, Promise.PLANNED, victim="0", moment="3:backward")
@pytest.mark.slow
def test_torchrun_with_our_module_survives_a_kill(
    tmp_path: Path, twin: Twin, reference: Launch
) -> None:
    spec = EngineSpec(stage=2, kills=("0@3:backward",))
    command = (*TORCHRUN, "--nproc-per-node=4", "--nnodes=1", f"--master-port={free_port()}")
    survived = launched((*command, "-m", "elaswave_plugin.run"), spec, tmp_path / "run")
    check_recovered(survived, twin=twin(survived), reference=reference(spec))


# By default two, since each imports the frameworks anew.
@proves(Kind.KILL, Promise.PLANNED, victim="0", moment="3:backward")
@pytest.mark.parametrize("nproc", sampled([2, 4]))
def test_the_deepspeed_launcher_with_our_module_survives_a_kill(
    tmp_path: Path, twin: Twin, reference: Launch, nproc: int
) -> None:
    spec = EngineSpec(nproc=nproc, stage=3, kills=("0@3:backward",))
    command = (DEEPSPEED, f"--num_gpus={nproc}", f"--master_port={free_port()}", "--module")
    survived = launched((*command, "elaswave_plugin.run"), spec, tmp_path / "run")
    check_recovered(survived, twin=twin(survived), reference=reference(spec))


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (*TORCHRUN, "--nproc-per-node=4", "--nnodes=1", "--master-port={port}", "-m"),
        (DEEPSPEED, "--num_gpus=4", "--master_port={port}", "--module"),
    ],
    ids=["torchrun", "deepspeed"],
)
def test_a_worker_of_a_pipeline_comes_back_without_a_zygote(
    tmp_path: Path, twin: Twin, reference: Launch, launcher: tuple[str, ...]
) -> None:
    """Its replacement is a new interpreter."""
    spec = spec_of(0, "backward", stage=1)
    command = tuple(word.format(port=free_port()) for word in launcher)
    survived = launched((*command, "elaswave_plugin.run"), spec, tmp_path / "run")
    check_pipeline(survived, twin, reference)
    check_back(survived, slots=(0,))
