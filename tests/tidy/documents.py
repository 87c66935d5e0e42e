"""Writes the parts of the documentation that follow from the code.

python -m tests.tidy.documents            write configs/elaswave.toml, patches/README.md, docs
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TOML = ROOT / "configs" / "elaswave.toml"
DOCS = ROOT / "docs"
SETTINGS = DOCS / "settings.md"
LEDGER = ROOT / "patches" / "README.md"
STEP_STATE = DOCS / "step_state.md"
LATENCY = DOCS / "latency.md"
LIMITS = DOCS / "limits.md"
OPERATIONS = DOCS / "operations.md"
PROOFS = DOCS / "proofs.md"
ARCHITECTURE = DOCS / "architecture.md"
HOW = "python -m tests.tidy.documents"
WIDTH = 100
# Shown, commented out, where a key has no default.
EXAMPLES = (
    ("loss", "tokens"),
    ("uninterruptible_timeout_s", 120.0),
    ("activation_room", 1.5),
    ("memory_limit_gib", 60.0),
    ("power_cap_w", 12000.0),
    ("dir", "out/run"),
    ("last_checkpoint_dir", "out/last"),
    ("run_id", "gpt-small-1"),
    ("stop_after", 6),
    ("seed", 1234),
    ("tensorboard", "out/tensorboard"),
)
PHASES = ("detect", "agree", "edit", "move", "rebind", "verify", "replay")


def schema() -> dict[str, dict[str, Any]]:
    """The keys of ElasticConfig in order, each with "default", "description" and its type."""
    from elaswave_plugin.config import ElasticConfig

    properties: dict[str, dict[str, Any]] = ElasticConfig.model_json_schema()["properties"]
    return properties


def kind_of(field: Mapping[str, Any]) -> str:
    """Say what a key takes, in words."""
    field = {**field, **next(iter(field.get("anyOf", [])), {})}
    if "enum" in field:
        return ", ".join(field["enum"])
    if field.get("format") == "path":
        return "path"
    if field["type"] == "integer" and "maximum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    if field["type"] == "integer":
        return f"from {field['minimum']}"
    if field["type"] == "number" and "minimum" in field:
        return f"from {field['minimum']:g}"
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


def settings_list() -> str:
    """All settings: what each takes, its default, its meaning."""
    return "\n".join(
        f"- `{key}` ({kind_of(field)}; {default_of(field)}): {field['description']}"
        for key, field in schema().items()
    )


def phases_table() -> str:
    """The phases in which a fault can strike."""
    from elaswave_plugin.config import OUTSIDE_PHASES, RECOVERY_PHASES, STEP_PHASES

    lines = ["| of | phases |", "|---|---|"]
    for whose, phases in (
        ("a step", STEP_PHASES),
        ("a recovery", RECOVERY_PHASES),
        ("the time outside of steps", OUTSIDE_PHASES),
    ):
        lines.append(f"| {whose} | {', '.join(f'`{phase}`' for phase in phases)} |")
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
    from elaswave_plugin.cli.doctor import as_json, examine

    return ledger_table(as_json(examine(None))["records"])


def latency_table() -> str:
    """The phases of a recovery, and what each took in the recorded runs."""
    flat, hybrid = (
        json.loads((ROOT / "benchmarks" / name).read_text("utf-8"))
        for name in ("recovery.json", "hybrid_recovery.json")
    )
    lines = [
        "| phase | 4 workers, median and max, ms | 8 workers, median, ms |",
        "|---|---|---|",
    ]
    for phase in PHASES:
        taken = [1e3 * row["phases_s"][phase] for row in flat["rows"]]
        among = 1e3 * hybrid["phases_s"][phase]
        lines.append(f"| `{phase}` | {median(taken):.1f}, {max(taken):.1f} | {among:.1f} |")
    beyond = [
        f"{1e3 * result['beyond_step_s'][which]:.1f}"
        for result, which in ((flat, "median"), (flat, "max"), (hybrid, "median"))
    ]
    total = "| all of it, less a step |"
    lines.append(f"{total} {beyond[0]}, {beyond[1]} | {beyond[2]} |")
    return "\n".join(lines)


def step_state_table() -> str:
    """The state of a step, one row an entry."""
    from elaswave_plugin.core.step.step_entries import state_of_a_step

    titles = ("state", "where", "in a redo", "for a worker that joins later", "compared by")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(one[:5]) + " |" for one in state_of_a_step())])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by `{HOW}` -->\n", f"\n<!-- end of {name} -->"


def block_of(text: str, name: str) -> str:
    """Return the text between the marks of a generated block. Raises ValueError without them."""
    begin, end = _marks(name)
    if begin not in text or end not in text:
        raise ValueError(f"no block {name!r}, wanted {begin.strip()} and {end.strip()}")
    return text.split(begin, 1)[1].split(end, 1)[0]


def with_block(text: str, name: str, body: str) -> str:
    """Return the text with a generated block written again."""
    begin, end = _marks(name)
    return text.replace(begin + block_of(text, name) + end, begin + body + end)


def parts() -> tuple[tuple[Path, str, Callable[[], str]], ...]:
    """Every generated part but the ledger: its page, its name, and what writes it."""
    from tests.tidy import features, function_index, proofs, refused, room_pages, told

    return (
        (ARCHITECTURE, "rooms", room_pages.rooms_list),
        (function_index.PAGE, function_index.NAME, function_index.functions_list),
        (SETTINGS, "settings", settings_list),
        (SETTINGS, "phases", phases_table),
        (LATENCY, "latency", latency_table),
        (STEP_STATE, "step state", step_state_table),
        (LIMITS, "features", features.features_table),
        (LIMITS, "megatron-core", refused.megatron_list),
        (LIMITS, "megatron-lm", refused.megatron_lm_list),
        (LIMITS, "deepspeed", refused.deepspeed_list),
        (OPERATIONS, "told", told.told_table),
        (PROOFS, "matrices", proofs.matrix_list),
        (PROOFS, "matrix results", proofs.results_line),
        *(
            (room_pages.page_of(room), "map", partial(room_pages.map_of, room))
            for room in room_pages.FOLDERS
        ),
    )


def write_all() -> None:
    """Write every generated part again."""
    from tests.tidy.proofs import declared_table

    # Two that take long to make: tests of the doctor and of the proofs compare them.
    slow = ((LEDGER, "ledger", ledger_now), (PROOFS, "declared", declared_table))
    for path, name, make in (*parts(), *slow):
        path.write_text(with_block(path.read_text("utf-8"), name, make()), "utf-8")
    TOML.write_text(toml_text(), "utf-8")


if __name__ == "__main__":
    write_all()
