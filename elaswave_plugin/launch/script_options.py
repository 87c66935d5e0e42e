"""The options of ours that a script is given: misspelled ones are found before anything starts.

Standard library only: the names are read from the source of the settings, which needs more.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError

_OURS = "--elaswave-"
# Beside the settings: the file that they may stand in.
_FURTHER = ("config",)


def check_script_options(args: Sequence[str]) -> None:
    """Raise ConfigurationError for an option of ours that no setting has; it may be abbreviated."""
    given = [arg.partition("=")[0] for arg in args]
    for option in given:
        spelled = option.replace("_", "-")
        if not spelled.startswith(_OURS):
            continue
        name = spelled.removeprefix(_OURS)
        names = [known.replace("_", "-") for known in (*_settings(), *_FURTHER)]
        if not any(known.startswith(name) for known in names):
            near = difflib.get_close_matches(name, names, n=1)
            meant = (
                f"did you mean {_OURS}{near[0]}?" if near else "docs/settings.md lists the settings"
            )
            raise ConfigurationError(f"{option} is no option of elaswave_plugin; {meant}")


def hint_for(message: str) -> str:
    """Say what to do about an option of ours that stands before the script; "" for any other."""
    if "--elaswave" not in message:
        return ""
    return ": options that begin with --elaswave are the script's, and go behind it"


def _settings() -> list[str]:
    """The names of the settings: the fields of ElasticConfig."""
    source = Path(__file__).parents[1] / "config.py"
    tree = ast.parse(source.read_text("utf-8"))
    (settings,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ElasticConfig"
    )
    return [
        node.target.id
        for node in settings.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
