"""Words that a script writes: names that attach, loader and the section do not know are refused."""

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaswave_plugin.adapters import megatron
from elaswave_plugin.adapters.megatron.job import ElasticJob
from elaswave_plugin.adapters.megatron.plain import PlainJob
from elaswave_plugin.ipc.environment import AGENT
from elaswave_plugin.trainer.fatal import ends_in_a_sentence

SIZES: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1, "seed": 1}


@pytest.fixture(autouse=True)
def nobody_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for job in ("ElasticJob", "PlainJob"):
        monkeypatch.setattr(megatron, job, lambda *_, **__: pytest.fail("it has attached"))


def refused(capsys: pytest.CaptureFixture[str], *args: Any, **sizes: Any) -> str:
    with pytest.raises(SystemExit) as end:
        megatron.attach(*args, **sizes)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sed", 3, "unknown name 'sed' (value 3); did you mean 'seed'?"),
        ("micro_batchsize", 1, "did you mean 'micro_batch_size'?"),
        ("consistency", "fast", "'consistency' is the option --elaswave-consistency, behind the"),
        ("respown", 3, "(value 3); 'respawn' is the option --elaswave-respawn, behind the script"),
        ("kill", ["1@2"], "(value ['1@2']); 'kill' is the option --elaswave-kill, behind the"),
        ("xyz", 0, "wanted one of global_batch_size, micro_batch_size, seed, tensor_model_paral"),
    ],
)
def test_a_name_of_attach(
    name: str, value: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, **SIZES, **{name: value})


def test_a_number_that_attach_is_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    args = megatron.add_arguments(argparse.ArgumentParser()).parse_args([])
    vars(args).update(SIZES)
    said = "attach got seed=2, and the arguments have seed 1: give one of them"
    assert said in refused(capsys, args, seed=2)


@pytest.mark.parametrize(
    "words",
    [["--elaswave-respwan=3"], ["--elaswave-resp", "3"], ["--elaswave", "--elaswave_seed=2"]],
)
def test_options_of_a_script_without_a_parser(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert "unknown option '--elaswave" in refused(capsys, **SIZES)


def test_a_setting_that_a_script_assigns(capsys: pytest.CaptureFixture[str]) -> None:
    args = megatron.add_arguments(argparse.ArgumentParser()).parse_args(["--elaswave"])
    vars(args).update(SIZES, elaswave_respwan=3)
    said = "unknown name 'elaswave_respwan' (value 3); did you mean 'elaswave_respawn'?"
    assert said in refused(capsys, args)


def test_a_name_of_a_deepspeed_loader(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed")
    from elaswave_plugin.deepspeed import loader

    engine = SimpleNamespace(deepspeed_io=None, train_micro_batch_size_per_gpu=lambda: 2)
    numbers = torch.utils.data.TensorDataset(torch.arange(8))
    data = torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True)
    for options, said in (
        ({"shufle": False}, "unknown name 'shufle' (value False); did you mean 'shuffle'?"),
        ({"shuffle": False}, "got shuffle=False, and the DataLoader has True: leave shuffle out"),
    ):
        with pytest.raises(SystemExit) as end:
            loader(engine, data, **options)
        assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("key", ["elaswav", "Elaswave"])
def test_a_section_by_another_name(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed")
    from elaswave_plugin.deepspeed import initialize

    with pytest.raises(SystemExit) as end:
        initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, key: {}})
    assert end.value.code == 2
    assert f"unknown key '{key}'; did you mean 'elaswave'?" in capsys.readouterr().err


def test_options_of_ours_that_a_deepspeed_script_does_not_obey(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    from elaswave_plugin.adapters.deepspeed_section import check_command_line
    from elaswave_plugin.deepspeed import initialize

    check_command_line(["--elaswave", "--elaswave-dir=x", "--elaswave-quiesce-timeout-s", "3"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--elaswave-respawn", "3"])
    config = {"train_batch_size": 1, "elaswave": {"enabled": True}}
    with pytest.raises(SystemExit) as end:
        initialize(model=torch.nn.Linear(2, 2), config=config)
    said = "--elaswave-respawn is given to a script of DeepSpeed's, which has its settings in the"
    assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ElasticJob, PlainJob])
@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        ("bind", {"train_itres": 3}, "'train_itres' (value 3); did you mean 'train_iters'?"),
        ("run", {"pahse": "save"}, "'pahse' (value 'save'); did you mean 'phase'?"),
        ("train", {"lst_checkpoint": 0}, "(value 0); did you mean 'last_checkpoint'?"),
    ],
)
def test_a_name_of_a_verb(
    kind: type, verb: str, given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        getattr(object.__new__(kind), verb)(print, **given)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"elaswave: {verb}: unknown name " in error and said in error


@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        (
            "run",
            {"pahse": "save"},
            "run: unknown name 'pahse' (value 'save'); did you mean 'phase",
        ),
        ("mean", {"vlaue": 1}, "mean: unknown name 'vlaue' (value 1); did you mean 'value'?"),
    ],
)
def test_a_name_of_a_verb_of_deepspeed(
    verb: str, given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from elaswave_plugin import deepspeed

    with pytest.raises(SystemExit) as end:
        getattr(deepspeed, verb)(SimpleNamespace(), **given)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_other_errors_of_types_are_the_scripts() -> None:
    @ends_in_a_sentence
    def verb(work: Any, *, phase: str = "") -> None:
        work(phase)

    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        verb(lambda: None, phase="")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        verb(**{"phase": ""})
