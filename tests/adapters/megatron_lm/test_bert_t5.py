"""pretrain_bert.py and pretrain_t5.py, which report means of losses over replicas."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import EVALUATION, ScriptSpec, needs_repository, printed
from tests.adapters.megatron_lm.sentences import write_sentences
from tests.adapters.megatron_lm.test_switched_on import UNNAMED
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.faults.harness import Outcome, Zygote, check_equal, launch
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

# pretrain_bert.py imports a name that is there with Transformer Engine only.
NEEDS_TE = "bert_layer_with_transformer_engine_spec, bert_layer_local_spec"
MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "126")
DATA = (
    *("--data-path", "{data}/sentences", "--vocab-file", "{data}/vocab.txt"),
    *("--tokenizer-type", "BertWordPieceLowerCase", "--legacy-tokenizer"),
)
BERT = (*DATA, "--spec", "local", "--mask-prob", "0.5")
T5 = (*DATA, "--vocab-extra-ids", "100", "--decoder-num-layers", "2", "--decoder-seq-length", "32")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
FP16 = ("--fp16", "--initial-loss-scale", "65536")


@pytest.fixture(scope="module")
def folder(script: Path, data: Path) -> Iterator[Path]:
    """The folder of the scripts, with one that needs no Transformer Engine, and their data."""
    write_sentences(data)
    bert = script.with_name("pretrain_bert.py")
    text = bert.read_text()
    assert NEEDS_TE in text
    bert.write_text(text.replace(NEEDS_TE, "bert_layer_local_spec", 1))
    yield script.parent
    bert.write_text(text)


@pytest.fixture
def run_script(
    folder: Path, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch a script of Megatron-LM by its name."""

    def launched(spec: ScriptSpec) -> Outcome:
        directory = tmp_path_factory.mktemp("run")
        spec = replace(spec, script=str(folder / spec.script))
        return launch(spec, zygote=zygote, data=data, directory=directory)

    return launched


def spec_of(script: str, *more: str) -> ScriptSpec:
    """A launch of a script by its name."""
    of_script = BERT if script == "pretrain_bert.py" else T5
    return ScriptSpec(
        script=script, options=(*EVALUATION, *of_script, *more), without=(*MOCK, *UNNAMED), steps=4
    )


SCRIPTS = pytest.mark.parametrize("script_name", ["pretrain_bert.py", "pretrain_t5.py"])


@proves(Kind.KILL, Promise.EQUAL)
@SCRIPTS
@pytest.mark.parametrize("more", [(), TP2, ("--bf16",)], ids=["dp", "tp", "bf16"])
def test_a_kill_leaves_every_number_as_it_is(
    run_script: Launch, script_name: str, more: tuple[str, ...]
) -> None:
    spec = spec_of(script_name, *more)
    killed, undisturbed = run_script(replace(spec, kills=("2@2:backward",))), run_script(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert "Traceback" not in killed.output


@proves(Kind.NOTHING, Promise.SAME)
@SCRIPTS
@pytest.mark.slow
def test_the_losses_are_those_without_the_plugin(
    run_script: Launch, folder: Path, data: Path, tmp_path: Path, script_name: str
) -> None:
    spec = spec_of(script_name, *NO_DROPOUT)
    script = folder / script_name
    plain = without_plugin(spec, script=script, data=data, folder=tmp_path / "plain")
    check_close(printed(run_script(spec)), plain)


# The stages of a launch, workers, and who is lost; a stage that is lost whole is built again by
# workers of others, with an embedding or with a head of BERT's.
STAGES = {
    "dp2-first": (PP2, 4, ("0@2:backward",)),
    "dp2-last": (PP2, 4, ("3@2:forward",)),
    "first-whole": (PP2, 4, ("0@1:backward", "1@2:forward")),
    "last-whole": (PP2, 4, ("2@1:forward", "3@2:backward")),
    "tp-fp16": ((*TP2, *PP2, "--sequence-parallel", *FP16), 8, ("5@2:backward",)),
    "interleaved": (INTERLEAVED, 4, ("1@2:backward",)),
    "untied": ((*PP2, "--untie-embeddings-and-output-weights"), 4, ("2@1:forward", "3@2:reduce")),
}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("named", STAGES)
def test_a_stage_of_bert_loses_workers(run_script: Launch, named: str) -> None:
    more, workers, kills = STAGES[named]
    spec = replace(spec_of("pretrain_bert.py", *more), nproc=workers)
    killed, undisturbed = run_script(replace(spec, kills=kills)), run_script(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert len(killed.events("view_committed")[-1]["ranks"]) == workers - len(kills)
    assert "Traceback" not in killed.output


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("slot", [0, 3])
def test_a_worker_of_berts_stages_comes_back(run_script: Launch, slot: int) -> None:
    spec = replace(spec_of("pretrain_bert.py", *PP2), steps=7)
    undisturbed = run_script(spec)
    back = run_script(
        replace(spec, kills=(f"{slot}@2:backward",), respawn=10, awaits=((4, 1),), dump="every")
    )
    check_equal(back, undisturbed)
    assert printed(back) == printed(undisturbed)
    assert [(one["slot"], one["incarnation"]) for one in back.events("entered")] == [(slot, 1)]
    assert "Traceback" not in back.output


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
def test_the_losses_of_stages_are_those_without_the_plugin(
    run_script: Launch, folder: Path, data: Path, tmp_path: Path
) -> None:
    spec = spec_of("pretrain_bert.py", *NO_DROPOUT, *PP2)
    script = folder / "pretrain_bert.py"
    plain = without_plugin(spec, script=script, data=data, folder=tmp_path / "plain")
    check_close(printed(run_script(spec)), plain)
