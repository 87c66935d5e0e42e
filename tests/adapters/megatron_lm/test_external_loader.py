"""--dataloader-type external: a loss ends no job, and equals a departure at the same step."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    NO_EVALUATION,
    ScriptSpec,
    needs_repository,
    printed,
)
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


PP2 = ("--pipeline-model-parallel-size", "2")


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_stages_read_the_same_after_a_loss(external: Launch, lost: int) -> None:
    spec = ScriptSpec(options=(*EXTERNAL, *PP2))
    killed = external(replace(spec, kills=(f"{lost}@3:backward",)))
    left = external(replace(spec, changes=(f"{lost}@3",)))
    assert killed.returncode == left.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    assert killed.trace() == left.trace()
    assert printed(killed)[1:] == printed(left)[1:]


# Tells the digest of each micro-batch of a training step that a stage is given.
TELLS = """
import json, os
import xxhash
from elaswave_plugin.adapters.megatron_lm.external_loader import ExternalLoader
native = ExternalLoader.__next__
def told(self):
    batch = native(self)
    digest = xxhash.xxh3_64_hexdigest(batch["tokens"].numpy().tobytes())
    with open(os.path.join(os.environ["ELASWAVE_DIR"], "read"), "a") as lines:
        lines.write(json.dumps([self.position, digest]) + "\\n")
    return batch
ExternalLoader.__next__ = told
"""


@proves(Kind.KILLS, Promise.GOES_ON, victim="0 2", moment="2:backward 4:forward")
def test_tokens_and_labels_of_a_micro_batch_are_those_of_one_reading(external: Launch) -> None:
    """Each batch is read by both stages: an even number of times, also where it was redone."""
    spec = ScriptSpec(options=(*NO_EVALUATION, *EXTERNAL[-2:], *PP2), sabotage=TELLS)
    killed = external(replace(spec, kills=("0@2:backward", "2@4:forward")))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 2
    lines = (killed.directory / "read").read_text().splitlines()
    of_last = [digest for place, digest in map(json.loads, lines) if place == 5 * 8]
    # Eight micro-batches, of which each is read at both stages.
    assert sorted(Counter(of_last).values()) == 8 * [2]
