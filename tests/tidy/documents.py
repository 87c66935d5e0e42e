"""Writes the parts of the documentation that follow from the code.

python -m tests.tidy.documents            write README.md, configs/*, patches/README.md
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TOML = ROOT / "configs" / "elaswave.toml"
SETTINGS = ROOT / "configs" / "README.md"
LEDGER = ROOT / "patches" / "README.md"
HOW = "python -m tests.tidy.documents"
WIDTH = 100
# Shown, commented out, where a key has no default.
EXAMPLES = (
    ("power_cap_w", 12000.0),
    ("dir", "out/run"),
    ("last_checkpoint_dir", "out/last"),
    ("run_id", "gpt-small-1"),
    ("seed", 1234),
    ("tensorboard", "out/tensorboard"),
)


def schema() -> dict[str, dict[str, Any]]:
    """The keys of ElasticConfig in order, each with "default", "description" and its type."""
    from elaswave_plugin.config import ElasticConfig

    properties: dict[str, dict[str, Any]] = ElasticConfig.model_json_schema()["properties"]
    return properties


def kind_of(field: Mapping[str, Any]) -> str:
    """What a key takes, in words."""
    field = {**field, **next(iter(field.get("anyOf", [])), {})}
    if "enum" in field:
        return ", ".join(field["enum"])
    if field.get("format") == "path":
        return "path"
    if field["type"] == "integer" and "maximum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    if field["type"] == "integer":
        return f"from {field['minimum']}"
    words = {"boolean": "on, off", "number": "above 0", "array": "a list", "string": "text"}
    return words[field["type"]]


def default_of(field: Mapping[str, Any]) -> str:
    """A default as the command line would give it."""
    value = field["default"]
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table() -> str:
    """All settings as a table."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key, field in schema().items():
        cells = (f"`{key}`", kind_of(field), default_of(field), field["description"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def toml_text() -> str:
    """A TOML file with every key, its default and its comment."""
    lines = [
        f"# Every setting with its default, written by `{HOW}`.",
        "# Use: --elaswave --elaswave-config FILE. An option on the command line wins.",
        "# Keys without a default are commented out.",
        "",
        "[elaswave]",
    ]
    for key, field in schema().items():
        text = f"{field['description']} (takes {kind_of(field)}; default {default_of(field)})"
        lines += ["", *(f"# {line}" for line in textwrap.wrap(text, WIDTH - 2))]
        if field["default"] is None:
            lines.append(f"# {key} = {json.dumps(dict(EXAMPLES)[key])}")
        else:
            lines.append(f"{key} = {json.dumps(field['default'])}")
    return "\n".join(lines) + "\n"


def ledger_table(records: Sequence[Mapping[str, str]]) -> str:
    """The run-time patch records as a table; they are those of `elaswave doctor --json`."""
    lines = ["| target | distribution | valid | applied | reason |", "|---|---|---|---|---|"]
    for record in records:
        cells = [record[name] for name in ("distribution", "valid", "applied", "reason")]
        row = (f"`{record['target']}`", *cells)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def ledger_now() -> str:
    """That table as of now; imports Megatron-Core."""
    from elaswave_plugin.doctor import as_json, examine

    return ledger_table(as_json(examine(None))["records"])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by `{HOW}` -->\n", f"\n<!-- end of {name} -->"


def block_of(text: str, name: str) -> str:
    """What stands between the marks of a generated block. Raises ValueError without them."""
    begin, end = _marks(name)
    if begin not in text or end not in text:
        raise ValueError(f"no block {name!r}, wanted {begin.strip()} and {end.strip()}")
    return text.split(begin, 1)[1].split(end, 1)[0]


def with_block(text: str, name: str, body: str) -> str:
    """The text with a generated block written anew."""
    begin, end = _marks(name)
    return text.replace(begin + block_of(text, name) + end, begin + body + end)


def write_all() -> None:
    """Write every generated part anew."""
    parts: tuple[tuple[Path, str, Callable[[], str]], ...] = (
        (SETTINGS, "settings", settings_table),
        (LEDGER, "ledger", ledger_now),
    )
    for path, name, make in parts:
        path.write_text(with_block(path.read_text("utf-8"), name, make()), "utf-8")
    TOML.write_text(toml_text(), "utf-8")


if __name__ == "__main__":
    write_all()
