"""The timeouts of agents: set by an option or the environment, under every launcher."""

import argparse
from pathlib import Path

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.launch import torchrun
from elaswave_plugin.launch.options import START_S, parse_run_args, read_timeouts


def test_an_option_wins_over_the_environment_and_that_over_the_default() -> None:
    env = {"ELASWAVE_NOTICE_TIMEOUT_S": "90", "ELASWAVE_JOIN_TIMEOUT_S": "80"}
    options = argparse.Namespace(notice_timeout_s=70.0, join_timeout_s=None)
    got = read_timeouts(options, env, quiesce_timeout_s=None)
    assert got.agreement == Timeouts(notice_timeout_s=70.0, join_timeout_s=80.0)
    assert got.start_s == START_S
    assert read_timeouts(None, env, quiesce_timeout_s=None).agreement.notice_timeout_s == 90.0


def test_the_settings_of_the_script_win_over_the_environment() -> None:
    env = {"ELASWAVE_QUIESCE_TIMEOUT_S": "9"}
    assert read_timeouts(None, env, quiesce_timeout_s=7.0).agreement.quiesce_timeout_s == 7.0
    assert read_timeouts(None, env, quiesce_timeout_s=None).agreement.quiesce_timeout_s == 9.0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ELASWAVE_QUORUM_WAIT_S", "soon", "ELASWAVE_QUORUM_WAIT_S: 'soon' is no positive number"),
        ("ELASWAVE_HEARTBEAT_TIMEOUT_S", "1", "--heartbeat-timeout-s is 1, wanted 2 or more"),
    ],
)
def test_bad_values_are_named_in_every_way_to_launch(
    name: str,
    value: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "s.py"
    script.touch()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words):
        parse_run_args([str(script)])
    assert torchrun.main([str(script)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_torchruns_launches_take_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun.main(["--heartbeat-timeout-s=1", "s.py"]) == 2
    assert "--heartbeat-timeout-s is 1, wanted 2 or more" in capsys.readouterr().err
    options = torchrun._parser().parse_args(
        ["--notice-timeout-s", "90", "s.py", "--notice-timeout-s=1"]
    )
    assert options.notice_timeout_s == 90.0 and options.args == ["--notice-timeout-s=1"]
