"""Words that nobody reads, wherever a user writes one: refused, and the nearest is named."""

import ast
import re
from pathlib import Path

import pytest

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.launch.options import check_environment, parse_run_args
from elaswave_plugin.launch.torchrun import main as run_of_torchrun
from elaswave_plugin.launch.torchrun import supervise
from elaswave_plugin.words import check_keys, check_options, setting_names

PACKAGE = Path(__file__).parents[2] / "elaswave_plugin"


def test_every_setting_is_an_option_and_is_written_whole() -> None:
    assert setting_names() == list(ElasticConfig.model_fields)
    names = [name.replace("_", "-") for name in ElasticConfig.model_fields]
    check_options([])
    check_options([f"--elaswave-{name}=1" for name in names])
    check_options(["--elaswave", "--elaswave-config", "f.toml", "--lr", "--elastic", "--", "-"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elaswave-respwan=3"], "'--elaswave-respwan' (value '3'); did you mean '--elaswave-re"),
        (["--elaswave-respwan", "3"], "(value '3'); did you mean '--elaswave-respawn'?"),
        # A launcher, which reads some of them, knows no abbreviation and no underscores.
        (["--elaswave-resp", "3"], "did you mean '--elaswave-respawn'?"),
        (["--elaswave_respawn", "3"], "did you mean '--elaswave-respawn'?"),
        (["--elaswave-quiesce=3"], "did you mean '--elaswave-quiesce-timeout-s'?"),
        (["--elaswav", "--lr"], "unknown option '--elaswav'; did you mean '--elaswave'?"),
        (["-elaswave-respawn", "3"], "did you mean '--elaswave-respawn'?"),
        (["--ELASWAVE"], "unknown option '--ELASWAVE'; did you mean '--elaswave'?"),
        (["--elaswvae-respawn", "3"], "did you mean '--elaswave-respawn'?"),
        (["--elaswave-quantum-flux"], "wanted one of --elaswave, --elaswave-config, --elaswave-"),
    ],
)
def test_an_option_of_the_script_is_told_by_every_launcher(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        parse_run_args([__file__, *words])
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        supervise(Program(script=__file__, args=tuple(words), module=False), {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc-per-nod=4"], "'--nproc-per-nod' (value '4'); did you mean '--nproc-per-node'?"),
        # More letters are like those of --wandb-project.
        (["--nproc", "4"], "'--nproc'; did you mean '--nproc-per-node'?"),
        (["--notice-timeout", "5"], "did you mean '--notice-timeout-s'?"),
        (["--respawn", "5"], "'--respawn' is the option --elaswave-respawn, behind the script"),
        (["--elaswave"], "'--elaswave' is the script's, and goes behind it"),
        (["--elaswave-seed=1"], "'--elaswave-seed' is the script's, and goes behind it"),
    ],
)
def test_an_option_of_the_launcher_is_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        parse_run_args([*words, __file__])


def test_an_option_of_the_launcher_under_torchrun_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_of_torchrun(["--elaswave-zygot=z", __file__]) == 2
    assert "did you mean '--elaswave-zygote'?" in capsys.readouterr().err


def test_what_stands_behind_the_script_is_the_scripts() -> None:
    spec = parse_run_args([__file__, "--nproc-per-nod=4", "--respawn", "5", "--notice-timeout"])
    assert spec.args == ("--nproc-per-nod=4", "--respawn", "5", "--notice-timeout")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ELASWAVE_NOTICE_TIMEOUT", "did you mean 'ELASWAVE_NOTICE_TIMEOUT_S'?"),
        ("ELASWAVE_RESREVE", "did you mean 'ELASWAVE_RESERVE'?"),
        ("ELASWAVE_SECRET", "did you mean 'ELASWAVE_SECRET_FILE'?"),
        ("ELASWAV_RESERVE", "did you mean 'ELASWAVE_RESERVE'?"),
        ("elaswave_reserve", "did you mean 'ELASWAVE_RESERVE'?"),
        ("ELASTWAVE_SECRET_FILE", "did you mean 'ELASWAVE_SECRET_FILE'?"),
        ("ELASWAVE_CONFIG", "'ELASWAVE_CONFIG' is the option --elaswave-config, behind the script"),
        ("ELASWAVE_RESPAWN", "'ELASWAVE_RESPAWN' is the option --elaswave-respawn, behind the scr"),
    ],
)
def test_a_variable_is_told_without_its_value(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_environment({name: "17654"})
    assert said in str(caught.value) and "17654" not in str(caught.value)


def test_variables_that_are_read_and_those_of_others_are_left_alone() -> None:
    read = {
        str(node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"ELASWAVE_[A-Z_]+", str(node.value))
    }
    assert len(read) > 10
    # A service of Kubernetes that is called elaswave sets the last three.
    others = ("ELASWAVE_HOME", "ELASWAVE_SERVICE_HOST", "ELASWAVE_PORT", "ELASWAVE_PORT_29400_TCP")
    check_environment(dict.fromkeys((*read, *others), "1"))


@pytest.mark.parametrize("key", ["elaswav", "Elaswave", "elasawve"])
def test_the_name_of_the_section_is_told(key: str) -> None:
    check_keys({"elasticity": {}, "elaswave": {}, "zero_optimization": {}})
    with pytest.raises(ConfigurationError, match=f"unknown key '{key}'; did you mean 'elaswave'?"):
        check_keys({"train_batch_size": 8, key: {}})


@pytest.mark.parametrize("key", ["elaswave_respawn", "elaswave.respawn", "elaswave-respwan"])
def test_a_key_beside_the_section_is_told(key: str) -> None:
    said = f"unknown key '{key}'; 'elaswave_respawn' is 'respawn' in the section 'elaswave'"
    with pytest.raises(ConfigurationError, match=said):
        check_keys({"elaswave": {"enabled": True}, key: 3})
