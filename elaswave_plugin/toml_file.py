"""The file of --elaswave-config. Standard library only: agents read it as well."""

import tomllib
from pathlib import Path
from typing import Any

from elaswave_plugin.errors import ConfigurationError


def toml_section(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file, at its top or in its only table [elaswave].

    Raises ConfigurationError for a file that cannot be read or is no TOML.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"configuration file {str(path)!r} cannot be read: {reason}; give a readable TOML file"
        ) from None
    except ValueError as error:
        raise ConfigurationError(
            f"configuration file {str(path)!r} is no TOML: {error}; correct that line"
        ) from None
    section = table.get("elaswave")
    return section if len(table) == 1 and isinstance(section, dict) else table
