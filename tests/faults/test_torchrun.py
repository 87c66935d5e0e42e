"""The same job under real torchrun: as a module, through PYTHON_EXEC, and without the plugin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.observer.observer import losses_of
from elaswave_plugin.observer.run import read_run
from tests.faults.conftest import Reference
from tests.faults.foreign_launchers import TORCHRUN, run_under
from tests.faults.harness import SCRIPT, JobSpec, Outcome, check_equal
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

pytestmark = pytest.mark.timeout(240)


def torchrun(
    spec: JobSpec, data: Path, directory: Path, *, through: list[str], **env: str
) -> Outcome:
    """Run a specification under torchrun with its usual options."""
    place = ("--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    launcher = (*TORCHRUN, f"--nproc-per-node={spec.nproc}", *place, *through)
    return run_under(launcher, spec, data=data, directory=directory, **env)


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="3:backward")
@pytest.mark.slow
def test_torchrun_with_our_module_survives_a_kill(
    data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = JobSpec(kills=("0@3:backward",))
    survived = torchrun(spec, data, tmp_path / "run", through=["-m", "elaswave_plugin.run"])
    check_equal(survived, reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:reduce")
def test_torchrun_with_python_exec_survives_a_kill(
    data: Path, tmp_path: Path, reference: Reference
) -> None:
    """The launch line is the user's own; only PYTHON_EXEC is in the environment."""
    spec = JobSpec(nproc=2, kills=("1@2:reduce",))  # two, since each imports the frameworks anew
    python = str(Path(sys.executable).with_name("elaswave-python"))
    survived = torchrun(spec, data, tmp_path / "run", through=[], PYTHON_EXEC=python)
    check_equal(survived, reference(spec))


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(("nproc", "per_token"), sampled([(4, False), (4, True), (2, True)]))
def test_without_a_kill_the_losses_are_those_of_the_script_without_the_plugin(
    data: Path, tmp_path: Path, reference: Reference, nproc: int, per_token: bool
) -> None:
    options = ["--attention-dropout=0", "--hidden-dropout=0"]
    options += ["--calculate-per-token-loss"] if per_token else []
    spec = JobSpec(nproc=nproc, options=tuple(options), steps=10)
    losses = tmp_path / "losses"
    plain = [one for one in spec.arguments(data, tmp_path) if not one.startswith("--elaswave")]
    subprocess.run(
        [
            *TORCHRUN,
            f"--nproc-per-node={spec.nproc}",
            f"--master-port={free_port()}",
            str(SCRIPT),
            *plain,
            f"--log-losses={losses}",
        ],
        check=True,
        capture_output=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    without = [float(line) for line in losses.read_text().split()]
    with_plugin = losses_of(read_run(reference(spec).directory))
    assert len(without) == spec.steps
    for step, loss in enumerate(without):
        assert abs(with_plugin[step] - loss) <= 1e-6 * abs(loss)
