"""`elaswave doctor LAUNCH` says what a job says, without running anything."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import corpus
from benchmarks.corpus import of_record
from elaswave_plugin.adapters.answers import Answer, worst
from elaswave_plugin.adapters.megatron_lm.script_arguments import check_arguments
from elaswave_plugin.adapters.megatron_lm_settings import settings
from elaswave_plugin.cli.launch_doctor import answers_of
from elaswave_plugin.cli.launch_files import arguments_of, read_launch
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.errors import ConfigurationError

LAUNCH = """
ARGS="--tensor-model-parallel-size 2 --use-distributed-optimizer --num-workers 0"
torchrun --nproc-per-node 8 pretrain_gpt.py $ARGS MORE
"""


def launch(folder: Path, more: str) -> Path:
    """A launch script with more flags."""
    path = folder / "launch.sh"
    path.write_text(LAUNCH.replace("MORE", more))
    return path


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ("", 0, ["pretrain_gpt.py attaches as it is"]),
        ("--num-workers 4", 0, ["attaches as it is"]),
        ("--async-save", 0, ["--async-save", "adjusted"]),
        ("--ddp-average-in-collective", 0, ["attaches as it is"]),
        (
            "--context-parallel-size 2 --fp8-format hybrid",
            2,
            ["--context-parallel-size is 2", "--fp8-format is hybrid", "refused for 2"],
        ),
        ("--mtp-num-layers 0 --use-pytorch-profiler", 0, ["attaches as it is"]),
        ("--save $1", 0, ["not known without a run: --save"]),
    ],
)
def test_a_launch_script_is_answered_setting_by_setting(
    more: str, code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", str(launch(tmp_path, more))]) == code
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("script", "stages", "refused"),
    [
        ("pretrain_bert.py", 1, False),
        ("pretrain_t5.py", 1, False),
        ("pretrain_bert.py", 16, False),
        ("pretrain_t5.py", 2, True),
        ("pretrain_mamba.py", 1, True),
    ],
)
def test_a_script_may_be_refused_by_its_name(script: str, stages: int, refused: bool) -> None:
    flags = {"--pipeline-model-parallel-size": stages}
    said = answers_of(of_record({"script": script, "flags": flags}))
    assert (worst(one.answer for one in said) is Answer.REFUSED) == refused


@pytest.mark.parametrize("setting", settings(), ids=lambda one: one.name)
def test_a_job_refuses_what_the_doctor_refuses_and_nothing_else(setting: Any) -> None:
    # With experts and a profile, so that every row of the table matters.
    values = {"num_experts": 4, "profile": True, "use_distributed_optimizer": True}
    for value in (*setting.carried, "another value"):
        flags = {**values, setting.name: value}
        said = answers_of(of_record({"script": "pretrain_gpt.py", "flags": dashed(flags)}))
        refused = worst(one.answer for one in said) is Answer.REFUSED
        assert refused == is_refused(argparse.Namespace(**arguments_of(dashed(flags)))), flags


def dashed(values: dict[str, Any]) -> dict[str, Any]:
    """Values as options of the command line."""
    options = {setting.name: setting.option for setting in settings()}
    return {options.get(n, f"--{n.replace('_', '-')}"): v for n, v in values.items()}


def is_refused(args: argparse.Namespace) -> bool:
    """Return whether a job refuses these arguments."""
    try:
        check_arguments(args)
    except ConfigurationError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("ds.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}', None),
        (
            "ds.json",
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param.device",
        ),
        (
            "accelerate.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n",
            None,
        ),
        (
            "accelerate.yaml",
            "distributed_type: DEEPSPEED\n"
            "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n",
            None,
        ),
        (
            "accelerate.yaml",
            "distributed_type: DEEPSPEED\n"
            "deepspeed_config: {zero_stage: 3, offload_param_device: nvme}\n",
            "zero_optimization.offload_param.device",
        ),
        ("recipe.yaml", "train:\n  use_distributed_optimizer: true\n  fp8_format: e4m3\n", "--fp8"),
    ],
)
def test_recipes_and_configurations_are_read(
    name: str, text: str, refused: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    said = [one for one in answers_of(read_launch(tmp_path / name)) if one.answer is Answer.REFUSED]
    assert len(said) == (refused is not None)
    assert all(one.sentence.startswith(str(refused)) for one in said)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("launch.sh", "echo nothing\n", "has no command that runs a Python script"),
        ("own.py", '"""Run by: torchrun own.py --elaswave"""\n', "is a Python script, wanted what"),
        ("recipe.yaml", "[1, 2\n", "is no YAML file"),
        ("ds.json", "[1, 2]\n", "holds list, wanted keys with values"),
        ("accelerate.yaml", "distributed_type: FSDP\n", "distributed_type FSDP"),
    ],
)
def test_what_is_no_launch_is_one_sentence(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert run_command(["doctor", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert run_command(["doctor", str(tmp_path / "absent.sh")]) == 2


def test_only_a_bash_script_wants_the_parser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    assert run_command(["doctor", str(launch(tmp_path, ""))]) == 2
    said = capsys.readouterr().err
    assert "wanted `pip install tree-sitter tree-sitter-bash`" in said and said.count("\n") == 1
    (tmp_path / "recipe.yaml").write_text("use_distributed_optimizer: true\n")
    assert run_command(["doctor", str(tmp_path / "recipe.yaml")]) == 0


def test_every_repository_of_a_corpus_counts_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attaches = {"--use-distributed-optimizer": True}
    records = [
        *({"repo": "large", "script": "pretrain_gpt.py", "flags": attaches} for _ in range(9)),
        {"repo": "large", "script": "pretrain_gpt.py", "flags": {**attaches, "--qk-clip": True}},
        {"repo": "small", "script": "pretrain_gpt.py", "flags": {"--qk-clip": True, **attaches}},
        {"repo": "other", "driver": "megatron-bridge", "flags": {}},
    ]
    (tmp_path / "corpus.json").write_text(json.dumps(records))
    assert corpus.main([str(tmp_path / "corpus.json")]) == 0
    said = capsys.readouterr().out
    assert "11 records of 2 repositories; 1 another loop, not counted" in said
    assert "9  45.0 %  attach (not refused)" in said
    assert "2  55.0 %     2  --qk-clip" in said
    (tmp_path / "corpus.json").write_text('[{"flags": {}}]')
    assert corpus.main([str(tmp_path / "corpus.json")]) == 2
    assert "holds no list of records" in capsys.readouterr().err
