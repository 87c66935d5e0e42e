"""The settings as options of a script's parser, and what they make of a launch."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_plugin.config import ElasticConfig, from_section
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.toml_file import toml_section
from elaswave_plugin.words import FLAG, NAME, check_words, option_of, variable


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --elaswave, --elaswave-config and one --elaswave-KEY per field; returns the parser."""
    group = parser.add_argument_group("elaswave")
    group.add_argument(
        FLAG,
        action="store_true",
        help="keep the job training through the loss of workers",
    )
    group.add_argument(
        option_of("config"),
        metavar="FILE",
        default=None,
        help="TOML file with the keys below; an option on the command line wins",
    )
    schema = ElasticConfig.model_json_schema()["properties"]
    for key, field in ElasticConfig.model_fields.items():
        repeated = field.default == ()
        # A switch that is off needs no word behind it.
        switch: dict[str, Any] = {"nargs": "?", "const": "on"} if field.default is False else {}
        default = "none" if field.default in (None, ()) else _shown(field.default)
        text = f"{field.description} (default: {default})".replace("%", "%%")
        group.add_argument(
            option_of(key),
            dest=f"{NAME}_{key}",
            metavar=_metavar(key, schema[key]),
            default=None,
            action="append" if repeated else "store",
            **switch,
            help=text + ("; may be repeated" if repeated else ""),
        )
    return parser


def from_namespace(args: argparse.Namespace) -> ElasticConfig | None:
    """Build the configuration from parsed arguments: option over TOML over default.

    None without --elaswave; any other --elaswave option is then an error rather than ignored.
    Raises ConfigurationError.
    """
    written = {key: value for key, value in vars(args).items() if key.startswith(f"{NAME}_")}
    known = {f"{NAME}_{key}": key for key in ElasticConfig.model_fields}
    check_words(written, [*known, f"{NAME}_config"], "the arguments: unknown name")
    toml = written.pop(f"{NAME}_config", None)
    given = {known[name]: value for name, value in written.items() if value is not None}
    if not getattr(args, NAME, False):
        if given or toml is not None:
            option = option_of(next(iter(given), "config"))
            raise ConfigurationError(f"{option} is given without {FLAG}; add {FLAG}")
        return None
    section = {} if toml is None else toml_section(toml)
    if section:
        # Blame the file for its own mistakes.
        from_section(section, source=str(toml), elsewhere={NAME: "the only table of its file"})
    settings = from_section({**section, **given}, source="command line")
    return as_launched(settings, os.environ)


def as_launched(settings: ElasticConfig, environ: Mapping[str, str]) -> ElasticConfig:
    """Compare settings with what the agents were told at the launch, and take its run directory.

    Raises ConfigurationError for one that the agents have otherwise, or that they alone could obey.
    """
    told, name = environ.get("ELASWAVE_DIR"), "quiesce_timeout_s"
    if told and settings.dir is None:
        settings = settings.model_copy(update={"dir": Path(told)})
    if told and settings.dir and settings.dir.absolute() != Path(told).absolute():
        raise ConfigurationError(_said_twice("dir", str(settings.dir), told))
    told = environ.get(variable(name))
    given = settings.quiesce_timeout_s
    if name in settings.model_fields_set and told is not None and float(told) != given:
        raise ConfigurationError(_said_twice(name, f"{given:g}", f"{float(told):g}"))
    several = environ.get("LOCAL_WORLD_SIZE", "1") != environ.get("WORLD_SIZE", "1")
    # A worker that comes later has the secret already.
    starts = several and environ.get("ELASWAVE_INCARNATION", "0") == "0"
    if settings.require_secret and starts and not environ.get("ELASWAVE_SECRET_FILE"):
        raise ConfigurationError(
            "require_secret is on, and ELASWAVE_SECRET_FILE is not set: make a file with `elaswave"
            " secret new FILE`, have it on every node, and name it there"
        )
    if settings.dump_state != "never" and settings.dir is None:
        raise ConfigurationError(
            f"dump_state is {settings.dump_state!r}, and there is no run directory to write to:"
            " give dir as well"
        )
    return settings


def _said_twice(name: str, here: str, told: str) -> str:
    return (
        f"{name} is {here} for the script, and the agents were told {told}: they hear the"
        " launcher's own option, the script's, the files of --elaswave-config and"
        f" --deepspeed_config, and {variable(name)}; set it in one of these places alone"
    )


def _metavar(key: str, choices: Mapping[str, Any]) -> str:
    if "enum" in choices:
        return "{" + ",".join(choices["enum"]) + "}"
    if choices.get("type") == "boolean":
        return "{on,off}"
    return key.rsplit("_", 1)[-1].upper()


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
