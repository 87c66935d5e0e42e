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


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_stages_are_refused(run_script: Launch) -> None:
    refused = run_script(spec_of("pretrain_bert.py", "--pipeline-model-parallel-size", "2"))
    assert refused.returncode == 2, refused.output[-3000:]
    assert "pipeline stages of a BertModel" in refused.output
