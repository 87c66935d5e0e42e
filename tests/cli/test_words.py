"""Unknown words of the command line of `elaswave` and of the launches that a doctor reads."""

import json
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command

VERBS = (
    *("demo", "rehearse", "report", "status", "drain", "migrate", "plan", "doctor"),
    *("checkpoint", "secret", "patch", "run"),
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statsu"], "'status'"),
        (["secret", "nwe", "f"], "'new'"),
        (["plan", "--dataflw", "auto"], "--dataflow"),
        (["demo", "--framwork=megatron"], "--framework"),
        (["rehearse", "--stpes", "4", "elaswave", "run"], "--steps"),
        (["rehearse", "--run", "retruns", "python", "x"], "did you mean 'returns'?"),
        (
            ["rehearse", "--run", "losses and returns", "python"],
            "wanted one of dealt-otherwise, lo",
        ),
        (["run", "--nod-rank=0", __file__], "did you mean '--node-rank'?"),
    ],
)
def test_the_nearest_word_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_an_option_that_it_has_not(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([verb, "--quantum-flux", "x"]) == 2
    error = capsys.readouterr().err
    assert "--quantum-flux" in error and error.count("\n") == 1


def test_every_verb_refuses_a_variable_that_is_nearly_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASWAVE_SECRET_FIEL", "/secret")
    for words in (["status", "."], ["run", __file__], ["plan"]):
        assert run_command(words) == 2
        assert "did you mean 'ELASWAVE_SECRET_FILE'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "torchrun a.py --elaswave --elaswave-respwan 3", "mean '--elaswave-respawn'?"),
        (
            "a.json",
            {"elaswave": {"respwan": 3}},
            "key 'respwan' (value 3); did you mean 'respawn'?",
        ),
        ("a.json", {"elaswave": {"enabld": True}}, "'enabled' is the switch of the section"),
        ("a.json", {"elaswave": {"consistency": "bits"}}, "'consistency' is 'bits', wanted"),
        ("a.json", {"elaswav": {"respawn": 3}}, "unknown key 'elaswav'; did you mean 'elaswave'?"),
    ],
)
def test_a_doctor_refuses_what_the_job_refuses(
    name: str,
    text: str | dict[str, object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = text if isinstance(text, str) else json.dumps({"train_batch_size": 8, **text})
    (tmp_path / name).write_text(written)
    assert run_command(["doctor", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--workers", "4"], "--workers is given without LAUNCH, and has no effect"),
        (["doctor", "a.sh", "--megatron-lm", "."], "--megatron-lm is given with LAUNCH, and has"),
        (["plan", "--split-backward", "always"], "--split-backward is always, and a plan splits"),
        (["run", "--rdzv-last-call", "3", __file__], "--rdzv-last-call is set, and --rdzv-dir or"),
        (["run", "--zygote=z", "--preload=torch", __file__], "--preload is 'torch' and --zygote"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words) == 2
    assert said in capsys.readouterr().err
