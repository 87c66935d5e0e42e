"""--sft: packed sequences of unequal lengths, of which a loss changes no number."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import EVALUATION, ScriptSpec, needs_repository, printed
from tests.adapters.megatron_lm.packed_data import write_conversations
from tests.adapters.megatron_lm.test_switched_on import UNNAMED
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.faults.harness import Outcome, Zygote, check_equal, launch
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("packed_data.py")
SFT = (
    *("--sft", "--data-path", "{data}/conversations.jsonl"),
    "--no-create-attention-mask-in-dataloader",
)
SPEC = ScriptSpec(options=(*EVALUATION, *SFT), without=("--mock-data", *UNNAMED), steps=4)
PP2 = ("--pipeline-model-parallel-size", "2")
PER_TOKEN = ("--calculate-per-token-loss",)


@pytest.fixture(scope="module")
def packed(script: Path, data: Path) -> Path:
    """The script with its data and stand-ins."""
    write_conversations(data / "conversations.jsonl")
    return Path(shutil.copy(SCRIPT, script.parent))


@pytest.fixture
def tune(
    packed: Path, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch the script."""

    def launched(spec: ScriptSpec) -> Outcome:
        directory = tmp_path_factory.mktemp("run")
        spec = replace(spec, script=str(packed))
        return launch(spec, zygote=zygote, data=data, directory=directory)

    return launched


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("more", "kills"),
    [
        ((), ("2@2:backward",)),
        (PER_TOKEN, ("0@1:forward", "3@2:data")),
        (PP2, ("1@2:backward",)),
        ((*PP2, *PER_TOKEN), ("2@1:forward", "3@2:backward")),
    ],
    ids=["dp", "per-token", "stages", "last-stage-whole"],
)
def test_a_kill_leaves_every_number_as_it_is(
    tune: Launch, more: tuple[str, ...], kills: tuple[str, ...]
) -> None:
    spec = replace(SPEC, options=(*SPEC.options, *more))
    killed, undisturbed = tune(replace(spec, kills=kills)), tune(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert len(killed.events("view_committed")[-1]["ranks"]) == 4 - len(kills)
    assert "Traceback" not in killed.output


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_a_lost_worker_comes_back(tune: Launch) -> None:
    spec = replace(SPEC, steps=7)
    back = tune(replace(spec, kills=("1@2:backward",), respawn=10, awaits=((4, 1),)))
    undisturbed = tune(spec)
    check_equal(back, undisturbed)
    assert printed(back) == printed(undisturbed)
    assert [(one["slot"], one["incarnation"]) for one in back.events("entered")] == [(1, 1)]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_tensor_parallelism_is_refused(tune: Launch) -> None:
    tp2 = ("--tensor-model-parallel-size", "2")
    refused = tune(replace(SPEC, options=(*SPEC.options, *tp2)))
    assert refused.returncode == 2, refused.output[-3000:]
    assert "--sft is True" in refused.output and "of a TP group" in refused.output


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), PP2], ids=["dp", "stages"])
def test_the_losses_are_those_without_the_plugin(
    tune: Launch, packed: Path, data: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Evaluations too, which Megatron-LM averages by micro-batch here."""
    spec = replace(SPEC, options=(*SPEC.options, *NO_DROPOUT, *more))
    plain = without_plugin(spec, script=packed, data=data, folder=tmp_path / "plain")
    check_close(printed(tune(spec)), plain)
