"""--dataloader-type external: a loss ends no job, and equals a departure at the same step."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import EVALUATION, ScriptSpec, needs_repository, printed
from tests.faults.harness import Outcome, Zygote, launch
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

EXTERNAL = (*EVALUATION, "--dataloader-type", "external")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SCRIPT = Path(__file__).with_name("external_data.py")


@pytest.fixture
def external(
    script: Path, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch the script with loaders of its own."""
    copied = shutil.copy(SCRIPT, script.parent)

    def launched(spec: ScriptSpec) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        spec = replace(spec, script=str(copied))
        return launch(spec, zygote=zygote, data=data, directory=folder)

    return launched


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("phase", ["data", "backward", "optimizer", "snapshot"])
@pytest.mark.parametrize("more", [(), TP2], ids=["dp", "tp"])
def test_a_loss_equals_a_departure_at_the_same_step(
    external: Launch, more: tuple[str, ...], phase: str
) -> None:
    spec = ScriptSpec(options=(*EXTERNAL, *more))
    killed = external(replace(spec, kills=(f"2@3:{phase}",)))
    left = external(replace(spec, changes=("2@3",)))
    assert killed.returncode == left.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    assert killed.trace() == left.trace()
    # The line of a step that is made again after it was logged is that of the first time.
    once = 4 if phase == "snapshot" else 0
    assert printed(killed)[once + 1 :] == printed(left)[once + 1 :]
    assert "--dataloader-type is external: after a loss other samples" in killed.output


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="3:backward")
def test_until_a_loss_nothing_differs_and_after_it_other_samples_are_read(external: Launch) -> None:
    spec = ScriptSpec(options=EXTERNAL)
    killed, undisturbed = external(replace(spec, kills=("1@3:backward",))), external(spec)
    assert printed(killed)[:3] == printed(undisturbed)[:3]
    assert len(printed(killed)) == len(printed(undisturbed))
    assert printed(killed)[4:] != printed(undisturbed)[4:]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_return_of_workers_is_refused_where_it_is_asked_for(external: Launch) -> None:
    refused = external(ScriptSpec(options=EXTERNAL, respawn=10))
    assert refused.returncode == 2
    assert "respawn is 10, and with --dataloader-type external" in refused.output


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_stages_are_refused(external: Launch) -> None:
    stages = ("--pipeline-model-parallel-size", "2")
    refused = external(ScriptSpec(options=(*EXTERNAL, *stages)))
    assert refused.returncode == 2
    assert "--dataloader-type is external" in refused.output
    assert "without pipeline parallelism" in refused.output
