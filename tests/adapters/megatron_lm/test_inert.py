"""Tests that need no repository of Megatron-LM: the parser's group, and nothing without it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.adapters.megatron_lm.script_arguments import adjust, check_arguments
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.megatron_lm import _with_our_group
from elaswave_plugin.words import option_of
from tests.proofs import Kind, Promise, proves

# A package that looks like megatron.training to whoever imports it.
PRETRAIN = """
import argparse

def pretrain(provider, extra_args_provider=None, args_defaults={}):
    parser = argparse.ArgumentParser()
    parser.add_argument("--theirs", type=int)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    print("arguments", vars(parser.parse_args()))
"""
SCRIPT = """
import sys
{imports}
from megatron.training import pretrain
pretrain(None, args_defaults={{"a": 1}})
heavy = [name for name in sys.modules if name.startswith("elaswave_plugin.recovery")]
heavy += [name for name in sys.modules if name.startswith("elaswave_plugin.adapters")]
print("heavy", heavy)
"""


# The same with the hook that a diff of patches/ adds.
HOOKED = """
import functools

def replaceable(function):
    call = lambda *args, **kwargs: (pretrain_hook or function)(*args, **kwargs)
    return functools.wraps(function)(call)

pretrain_hook = None
pretrain = known = replaceable(pretrain)
"""


def run_script(
    folder: Path, imports: str, *words: str, source: str = PRETRAIN
) -> subprocess.CompletedProcess[str]:
    """Run a script of the stand-in package; the plugin is there as torch's entry point has it."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .training import pretrain\n")
    (package / "training.py").write_text(source)
    (folder / "script.py").write_text(SCRIPT.format(imports=imports))
    return subprocess.run(
        [sys.executable, str(folder / "script.py"), *words],
        capture_output=True,
        text=True,
        timeout=90,
        env=dict(os.environ),
    )


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize("imports", ["import torch", "import megatron.training, torch"])
def test_without_the_flag_the_arguments_are_theirs_and_nothing_is_imported(
    tmp_path: Path, imports: str
) -> None:
    done = run_script(tmp_path, imports, "--theirs", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "arguments {'theirs': 3}" in done.stdout
    assert "heavy []" in done.stdout


@proves(Kind.NOTHING, Promise.SAME)
def test_their_help_lists_our_group(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import torch", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "elaswave:" in done.stdout
    for key in ElasticConfig.model_fields:
        assert option_of(key) in done.stdout


@proves(Kind.NOTHING, Promise.SAME)
def test_a_hook_of_theirs_is_set_and_nothing_replaced(tmp_path: Path) -> None:
    imports = "import torch\nfrom megatron.training import training as module\n"
    asked = f"{imports}print('is theirs', module.pretrain is module.known)"
    done = run_script(tmp_path, asked, "--help", source=PRETRAIN + HOOKED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is theirs True" in done.stdout and "elaswave:" in done.stdout


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_an_option_without_the_flag_is_refused_and_not_ignored(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import torch", "--elaswave-kill=1@2")
    assert done.returncode == 2
    assert "--elaswave-kill is given without --elaswave; add --elaswave" in done.stderr


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize("words", [["--elaswave", "--elaswave-resp=3"], ["--elaswave-respwan=3"]])
def test_an_option_that_is_nearly_ours_is_told(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        _with_our_group(None, words, argparse.ArgumentParser())
    assert end.value.code == 2
    assert "(value '3'); did you mean '--elaswave-respawn'?" in capsys.readouterr().err


@proves(Kind.NOTHING, Promise.SAME)
def test_a_provider_of_the_script_is_kept() -> None:
    def theirs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--more", default=7)
        return parser

    parser = _with_our_group(theirs, [], argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {"more": 7}
    words = ["--elaswave", "--elaswave-seed", "5"]
    given = _with_our_group(theirs, words, argparse.ArgumentParser()).parse_args(words)
    assert vars(given) == {"more": 7, "elaswave": True, "elaswave_seed": "5"}


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adlr_autoresume", True),
        ("skip_train", True),
        ("context_parallel_size", 2),
        ("qk_clip", True),
    ],
)
def test_an_argument_that_is_not_carried_is_named(name: str, value: object) -> None:
    check_arguments(argparse.Namespace())
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} is .*, and .*: "):
        check_arguments(argparse.Namespace(**{name: value}))


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_all_arguments_that_are_not_carried_are_named_at_once() -> None:
    refused = argparse.Namespace(context_parallel_size=2, qk_clip=True, fp8="hybrid")
    with pytest.raises(ConfigurationError) as caught:
        check_arguments(refused)
    assert "3 settings are refused: (1) --" in str(caught.value)
    for option in ("--context-parallel-size", "--qk-clip", "--fp8-format"):
        assert option in str(caught.value)


@proves(Kind.NOTHING, Promise.SAME)
def test_checkpoints_are_those_of_the_optimizer_that_the_script_named() -> None:
    args = argparse.Namespace(save="folder", use_distributed_optimizer=False)
    script = adjust(args)
    assert args.use_distributed_optimizer is True
    with script.as_given(args):
        assert args.use_distributed_optimizer is False
    assert args.use_distributed_optimizer is True


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("param_name_patterns_for_fp32_local_accumulation", []),
        ("mtp_num_layers", 0),
        ("moe_latent_size", 8),
    ],
)
def test_what_switches_nothing_on_is_not_refused(name: str, value: object) -> None:
    check_arguments(argparse.Namespace(**{name: value}))


@proves(Kind.NOTHING, Promise.SAME)
def test_what_is_adjusted_is_said_and_what_the_script_had_is_kept() -> None:
    args = argparse.Namespace(
        save="folder",
        use_distributed_optimizer=True,
        dist_ckpt_optim_fully_reshardable=False,
    )
    script = adjust(args)
    assert args.dist_ckpt_optim_fully_reshardable is True
    with script.as_given(args):
        assert args.use_distributed_optimizer is True
    assert script.given == {
        "dist_ckpt_optim_fully_reshardable": False,
    }
    assert [one.split(" is ")[0] for one in script.said] == [
        "--dist-ckpt-optim-fully-reshardable",
    ]
