"""--fim-data: a sample is permuted alike whoever reads it, on every stage, and read again."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.fim_data import NUM_IDS, SPECIAL, write_documents
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_switched_on import UNNAMED
from tests.faults.harness import Outcome, Zygote, check_equal, launch
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("fim_data.py")
FIM = (
    *("--fim-data", "--fim-rate", "0.7", "--fim-eod-token", SPECIAL[-1]),
    *("--data-path", "{data}/documents", "--samples", "samples"),
)
SPEC = ScriptSpec(options=(*NO_EVALUATION, *FIM), without=("--mock-data", *UNNAMED), steps=5)
PREFIX = NUM_IDS + SPECIAL.index("<fim_prefix>")
PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.fixture
def permuting(
    script: Path, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch the script with its data."""
    copied = Path(shutil.copy(SCRIPT, script.parent))
    write_documents(data)

    def launched(spec: ScriptSpec) -> Outcome:
        directory = tmp_path_factory.mktemp("run")
        spec = replace(spec, script=str(copied))
        return launch(spec, zygote=zygote, data=data, directory=directory)

    return launched


def read(run: Outcome) -> list[tuple[int, str]]:
    """Each reading of a sample: its number and its ids."""
    lines = (run.directory / "samples").read_text().splitlines()
    return [(int(number), ids) for number, _, ids in (line.partition(" ") for line in lines)]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("more", "kills"),
    [((), ("1@2:backward",)), (PP2, ("2@1:forward", "1@3:backward"))],
    ids=["dp", "stages"],
)
def test_a_kill_leaves_every_sample_as_it_is(
    permuting: Launch, more: tuple[str, ...], kills: tuple[str, ...]
) -> None:
    spec = replace(SPEC, options=(*SPEC.options, *more))
    killed, undisturbed = permuting(replace(spec, kills=kills)), permuting(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    # A sample that is read again, by another worker or stage, has the same ids.
    assert len(read(killed)) > len(set(read(killed))) == len(set(read(undisturbed)))
    assert set(read(killed)) == set(read(undisturbed))
    assert len(dict(read(killed))) == len(set(read(killed)))
    assert sum(f" {PREFIX}," in ids for _, ids in set(read(killed))) > 5
