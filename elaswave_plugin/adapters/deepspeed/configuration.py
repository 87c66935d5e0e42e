"""The configuration of a call to deepspeed.initialize, found and read as DeepSpeed does it.

Imports next to nothing of ours, as jobs without our section come here too.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.words import NAME as SECTION
from elaswave_plugin.words import check_keys


def check_section_name(config: Mapping[str, Any]) -> None:
    """End the process in a sentence where a key nearly names our section."""
    try:
        check_keys(config)
    except ConfigurationError as error:
        import_module("elaswave_plugin.trainer.fatal").end_in_a_sentence(error)


def arguments_of(
    native: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the call by name; TypeError where DeepSpeed would raise it too."""
    return dict(inspect.signature(native).bind(*args, **kwargs).arguments)


def configuration_of(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration: a dict, a path or base64; empty where DeepSpeed is going to complain."""
    config = arguments.get("config") or arguments.get("config_params")
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, Mapping):
        return config or {}
    return load_ds_config(config)


def missing_in(config: Mapping[str, Any]) -> str | None:
    """Return what a configuration lacks for an engine to join the job; None for nothing."""
    section = config.get(SECTION)
    if section is None:
        return (
            f'the DeepSpeed configuration has no section "{SECTION}"; add'
            f' "{SECTION}": {{"enabled": true}}'
        )
    if isinstance(section, Mapping) and section.get("enabled", True) is False:
        return (
            f'"enabled" is false in the section "{SECTION}" of the DeepSpeed configuration; set it'
            " to true"
        )
    return None


def only_answers(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether an engine has no optimizer, as that of a reference model."""
    return config.get("optimizer") is None and arguments.get("optimizer") is None
