"""Reads what somebody launches: a bash script, a YAML recipe, or a configuration of DeepSpeed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from elaswave_plugin.adapters.deepspeed_section import read_section
from elaswave_plugin.adapters.megatron_lm_settings import settings
from elaswave_plugin.cli.bash_words import UNKNOWN, training_command
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import check_keys, check_options

# Keys by which a mapping is known to be for DeepSpeed.
_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_OF_ACCELERATE = ("distributed_type", "deepspeed_config", "mixed_precision", "fsdp_config")
# What Accelerate's section says, and the key of DeepSpeed's configuration that it becomes.
_ZERO_KEYS = (
    ("offload_optimizer_device", "offload_optimizer"),
    ("offload_param_device", "offload_param"),
)
_CONSTANTS = (("true", True), ("false", False), ("none", None), ("null", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of a launch."""

    script: str = ""
    """The Python script; empty where a recipe names none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of Megatron-LM, by their names."""
    deepspeed: Mapping[str, Any] | None = None
    """The configuration of DeepSpeed; None for a launch of Megatron-LM."""
    unknown: tuple[str, ...] = ()
    """Options whose value only a run tells."""
    workers: int = 0
    """Workers of all nodes, by the options of torchrun; 0 where these do not tell."""
    nodes: int = 1


def read_launch(path: Path) -> Launch:
    """Read a file by what is in it.

    Raises ConfigurationError where it is no launch, and for words that are nearly ours.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix == ".py":
        raise ConfigurationError(
            f"{path} is a Python script, wanted what launches it: a launch script of bash, a YAML"
            " recipe, or a configuration of DeepSpeed or Accelerate"
        )
    if path.suffix in (".json", ".yaml", ".yml"):
        return _of_mapping(_parsed(text, path), path)
    launcher, words = training_command(text)
    if not words:
        raise ConfigurationError(
            f"{path} has no command that runs a Python script; give a launch script of bash, a YAML"
            " recipe, or a configuration of DeepSpeed or Accelerate"
        )
    nodes, width = (_option(launcher, name) for name in ("nnodes", "nproc-per-node"))
    check_options(words[1:])
    launch = of_words(words[0], words[1:])
    return replace(launch, workers=(nodes or 1) * width, nodes=nodes or 1)


def _option(words: Sequence[str], name: str) -> int:
    """Return a number among the words of a launcher; 0 where there is none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, _, value = word.replace("_", "-").partition("=")
        if option == f"--{name}":
            number = value or after
            return int(number) if number.isdecimal() else 0
    return 0


def of_words(script: str, words: Sequence[str]) -> Launch:
    """A launch of a script with the words behind it."""
    flags: dict[str, Any] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            flags[option] = value if equals else True
        elif option:
            before = flags[option]
            flags[option] = word if before is True else f"{before} {word}"
    unknown = tuple(name for name, value in flags.items() if UNKNOWN in str(value))
    # Where only a run tells a value, its setting is not judged, and still counts as given.
    known = {n: v for n, v in flags.items() if n not in unknown or n not in _by_option()}
    return Launch(script=Path(script).name, arguments=arguments_of(known), unknown=unknown)


def arguments_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that options of the command line make, by their names."""
    found, by_option = {}, _by_option()
    for option, value in flags.items():
        plain = "--" + option.removeprefix("--").replace("_", "-")
        name = by_option.get(plain, plain.removeprefix("--").replace("-", "_"))
        found[name] = _value(value)
    return found


def _by_option() -> dict[str, str]:
    """The name of each setting of the table, by its option."""
    return {setting.option: setting.name for setting in settings()}


def _value(value: Any) -> Any:
    if isinstance(value, str):
        constants = dict(_CONSTANTS)
        if value.lower() in constants:
            return constants[value.lower()]
        return int(value) if re.fullmatch(r"-?\d+", value) else value
    return value


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        line = str(error).splitlines()[0]
        raise ConfigurationError(f"{path} is no {path.suffix[1:].upper()} file: {line}") from error


def _of_mapping(content: Any, path: Path) -> Launch:
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path} holds {type(content).__name__}, wanted keys with values")
    if any(key in content for key in _OF_DEEPSPEED):
        check_keys(content)
        read_section(content)
        return Launch(deepspeed=content)
    if any(key in content for key in _OF_ACCELERATE):
        return _of_accelerate(content, path)
    return Launch(arguments=arguments_of(dict(_leaves(content))))


def _of_accelerate(content: Mapping[str, Any], path: Path) -> Launch:
    kind = str(content.get("distributed_type", "NO"))
    if kind.upper() != "DEEPSPEED":
        raise ConfigurationError(
            f"{path} has distributed_type {kind}, and elaswave_plugin carries DEEPSPEED: run "
            "`accelerate config` and choose DeepSpeed, ZeRO 1 to 3"
        )
    section = content.get("deepspeed_config") or {}
    if isinstance(section, Mapping) and (file := section.get("deepspeed_config_file")):
        return read_launch(path.parent / str(file))
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 0)}
    for key, becomes in _ZERO_KEYS:
        zero[becomes] = {"device": section.get(key, "none")}
    return Launch(deepspeed={"zero_optimization": zero})


def _leaves(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every key that has no further keys; a recipe groups them as it likes."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        found += _leaves(value) if isinstance(value, Mapping) else [(str(key), value)]
    return found
