"""ElasticConfig: keys are frozen, options win over files, a bad value costs one sentence."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import elaswave_plugin
from elaswave_plugin.command_line import add_arguments, from_namespace
from elaswave_plugin.config import Change, ElasticConfig, from_section
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import check_given

KEYS = (
    "activation_room",
    "change",
    "clock_table",
    "clocks",
    "consistency",
    "data_timeout_s",
    "dataflow",
    "dir",
    "dump_state",
    "gpu_engine",
    "hang_start_timeout_s",
    "hang_timeout_s",
    "input_seal_mib",
    "kill",
    "last_checkpoint_dir",
    "loss",
    "memory_limit_gib",
    "move_layers",
    "power_cap_w",
    "quiesce_timeout_s",
    "rehearse_first_step",
    "require_secret",
    "respawn",
    "run_id",
    "seed",
    "slow_workers",
    "snapshot_copies",
    "snapshot_interval",
    "snapshots",
    "split_backward",
    "stop_after",
    "tensorboard",
    "transfer_timeout_s",
    "uninterruptible_timeout_s",
    "wandb",
    "wandb_project",
)


def parse(*argv: str) -> ElasticConfig | None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return from_namespace(parser.parse_args(argv))


def test_config_keys_are_frozen() -> None:
    assert tuple(sorted(ElasticConfig.model_fields)) == KEYS


def test_config_every_key_is_an_option_with_description_and_default_in_its_help() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    actions = {action.dest: action for action in parser._actions}
    for key, field in ElasticConfig.model_fields.items():
        action = actions[f"elaswave_{key}"]
        assert action.option_strings == [f"--elaswave-{key.replace('_', '-')}"]
        assert field.description and field.description in str(action.help)
        assert "(default: " in str(action.help)
        if key.endswith("_s"):
            assert "seconds" in str(action.help)


def test_config_without_elaswave_is_none() -> None:
    assert parse() is None


def test_config_defaults() -> None:
    assert parse("--elaswave") == ElasticConfig()
    assert ElasticConfig().consistency == "exact" and ElasticConfig().snapshots


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ElasticConfig().seed = 1  # type: ignore[misc]


def test_config_option_wins_over_toml_and_toml_over_default(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[elaswave]\nconsistency = "fast"\ntransfer_timeout_s = 90\nkill = ["1@2:data"]\n'
    )
    got = parse("--elaswave", "--elaswave-config", str(path), "--elaswave-transfer-timeout-s", "45")
    assert got is not None
    assert (got.consistency, got.transfer_timeout_s, got.seed) == ("fast", 45.0, None)
    assert [str(kill) for kill in got.kills()] == ["1@2:data"]
    got = parse("--elaswave", "--elaswave-config", str(path))
    assert got is not None and got.transfer_timeout_s == 90


def test_config_values_from_the_command_line_have_their_types() -> None:
    got = parse(
        *("--elaswave", "--elaswave-snapshots", "off", "--elaswave-seed", "7"),
        *("--elaswave-kill", "2@10", "--elaswave-kill", "0@11:optimizer"),
        *("--elaswave-change", "3@4", "--elaswave-change", "+3@9", "--elaswave-dir", "out/x"),
    )
    assert got is not None
    assert got.snapshots is False and got.seed == 7 and got.dir == Path("out/x")
    assert [(k.slot, k.step, k.phase) for k in got.kills()] == [
        (2, 10, "backward"),
        (0, 11, "optimizer"),
    ]
    assert got.changes() == (
        Change(slot=3, step=4),
        Change(slot=3, step=9, arrives=True),
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"snapshot": True}, ["unknown key 'snapshot'", "True", "snapshots"]),
        ({"consistency": "sure"}, ["'consistency' is 'sure'", "'exact' or 'fast'"]),
        ({"snapshot_copies": -1}, ["'snapshot_copies' is -1", "greater than or equal to 0"]),
        ({"snapshot_interval": 0}, ["snapshot_interval is 0", "auto or a number of steps"]),
        ({"snapshot_interval": "1.5"}, ["snapshot_interval is 1.5", "from 1 on"]),
        ({"snapshot_interval": -3}, ["snapshot_interval is -3"]),
        ({"transfer_timeout_s": 0}, ["'transfer_timeout_s' is 0", "greater than 0"]),
        ({"transfer_timeout_s": float("inf")}, ["'transfer_timeout_s' is inf", "finite"]),
        ({"seed": "many"}, ["'seed' is 'many'", "integer"]),
        ({"kill": ["2"]}, ["kill is '2'", "SLOT@STEP[:PHASE]"]),
        ({"kill": ["2@3:data:nap"]}, ["'nap'", "kill, loop, gil, stop"]),
        ({"kill": ["2@3:lunch"]}, ["'2@3:lunch'", "'lunch'", "backward"]),
        ({"respawn": True}, ["'respawn' is True", "wanted a number"]),
        ({"seed": False}, ["'seed' is False", "wanted a number"]),
        ({"hang_timeout_s": True}, ["'hang_timeout_s' is True", "wanted a number"]),
        ({"wandb": True}, ["'wandb' is True", "offline"]),
        ({"kill": "2@3"}, ["'kill' is '2@3'", "list"]),
        ({"change": ["2@3:data"]}, ["change is '2@3:data'", "SLOT@STEP"]),
        ({"change": ["-2@3"]}, ["change is '-2@3'", "+SLOT@STEP"]),
        ({"run_id": "a/b"}, ["'run_id' is 'a/b'"]),
        ({"clock_table": "0.9 1.1"}, ["clock_table is '0.9 1.1'", "with 1 among them"]),
        ({"clock_table": "1 0.9"}, ["clock_table is '1 0.9'", "rising numbers"]),
        ({"clock_table": "fast 1"}, ["clock_table is 'fast 1'", "0.8 0.9 1 1.1"]),
        ({"wandb_project": "p"}, ["wandb_project is 'p' and wandb is off", "set wandb, or leave"]),
        ({"snapshots": False, "snapshot_copies": 2}, ["snapshot_copies is 2 and snapshots is off"]),
        ({"snapshots": False, "snapshot_interval": 4}, ["snapshot_interval is '4' and snapshots"]),
        ({"snapshots": False, "respawn": 3}, ["respawn is 3 and snapshots is off, from which"]),
        ({"data_timeout_s": 1}, ["data_timeout_s is 1 and hang_timeout_s is 2", "lower hang_"]),
        ({"hang_start_timeout_s": 4, "hang_timeout_s": 5}, ["hang_start_timeout_s is 4 and hang"]),
        ({"power_cap_w": 900}, ["power_cap_w is 900 and clocks is off"]),
        ({"clock_table": "0.5 1"}, ["clock_table is '0.5 1' and clocks is off"]),
        ({"power_cap_w": 0}, ["'power_cap_w' is 0", "greater than 0"]),
        ({"memory_limit_gib": 0}, ["'memory_limit_gib' is 0", "greater than 0"]),
        ({"activation_room": 0.9}, ["'activation_room' is 0.9", "greater than or equal to 1"]),
        (
            {"activation_room": 2, "dataflow": "reroute"},
            ["activation_room is 2 and dataflow is reroute", "leave one of them out"],
        ),
    ],
)
def test_config_bad_section_costs_one_sentence(
    section: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_section(section)
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    assert all(word in message for word in words), message
    said = caught.value
    assert said.__cause__ is None and (said.__suppress_context__ or said.__context__ is None)


def test_config_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        parse("--elaswave", "--elaswave-config", str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ConfigurationError, match=r"broken\.toml.* is no TOML"):
        parse("--elaswave", "--elaswave-config", str(broken))
    broken.write_text("copies = 1")
    with pytest.raises(ConfigurationError, match=r"broken\.toml: unknown key 'copies'"):
        parse("--elaswave", "--elaswave-config", str(broken))


@pytest.mark.parametrize("option", ["--elaswave-seed", "--elaswave-config"])
def test_config_option_without_elaswave_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} is given without --elaswave"):
        parse(option, "1")


def test_config_a_table_of_another_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[elaswav]\nrespawn = 3\n")
    with pytest.raises(ConfigurationError, match=r"'elaswav' .*'elaswave' is the only table"):
        parse("--elaswave", "--elaswave-config", str(path))


def test_config_that_the_launch_leaves_without_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="dump_state is 'last', and there is no run dir"):
        parse("--elaswave", "--elaswave-dump-state=last")
    secret = ("--elaswave", "--elaswave-require-secret")
    assert parse(*secret) is not None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="require_secret is on, and ELASWAVE_SECRET_FILE"):
        parse(*secret)
    monkeypatch.setenv("ELASWAVE_SECRET_FILE", "/file")
    assert parse(*secret) is not None
    monkeypatch.setenv("ELASWAVE_QUIESCE_TIMEOUT_S", "9.0")
    with pytest.raises(ConfigurationError, match="quiesce_timeout_s is 4 for the script, and the"):
        parse("--elaswave", "--elaswave-quiesce-timeout-s=4")


def test_import_of_the_package_is_light() -> None:
    code = (
        "import sys, elaswave_plugin as e; dir(e); e.ConfigurationError;"
        "heavy = {'torch', 'pydantic', 'typer', 'numpy', 'rich', 'megatron'} & set(sys.modules);"
        "assert not heavy, heavy; e.ElasticConfig; assert 'pydantic' in sys.modules;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names_exist() -> None:
    for name in elaswave_plugin.__all__:
        assert getattr(elaswave_plugin, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        elaswave_plugin.absent  # noqa: B018


def test_config_without_respawn_refuses_only_what_the_user_asked_for() -> None:
    assert from_section({}).without_respawn("it cannot").respawn == 0
    assert from_section({"respawn": 0}).without_respawn("it cannot").respawn == 0
    with pytest.raises(ConfigurationError, match="respawn is 3, and it cannot; set it to 0"):
        from_section({"respawn": 3}).without_respawn("it cannot")


def test_what_workers_were_given_has_to_be_alike() -> None:
    mine = ElasticConfig().of_the_job()
    assert set(mine) < set(KEYS)
    check_given({"worker 0": mine, "worker 1": ElasticConfig(hang_timeout_s=9).of_the_job()})
    other = ElasticConfig(consistency="fast").of_the_job()
    with pytest.raises(ConfigurationError) as caught:
        check_given({"worker 0": mine, "worker 1": mine, "worker 2": other})
    assert "consistency is 'exact' for worker 0 and 'fast' for worker 2" in str(caught.value)


def test_the_directory_of_the_launch_is_the_run_directory_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASWAVE_DIR", "/launched")
    launched, again = parse("--elaswave"), parse("--elaswave", "--elaswave-dir", "/launched")
    assert launched is not None and launched.dir == Path("/launched")
    assert again == launched and parse() is None
    with pytest.raises(ConfigurationError, match=r"dir is /given for .* were told /launched: "):
        parse("--elaswave", "--elaswave-dir", "/given")
