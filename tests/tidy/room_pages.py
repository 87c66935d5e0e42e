"""The maps in the READMEs of the rooms: what a room is for, its arrows and its files."""

import ast
import textwrap
from pathlib import Path

from tests.tidy.rooms import ROOMS

PACKAGE = Path(__file__).resolve().parents[2] / "elaswave_plugin"
# Rooms that are folders; the others are files at the root, which have no README.
FOLDERS = tuple(sorted(room for room in ROOMS if (PACKAGE / room).is_dir()))
WIDTH = 118


def page_of(room: str) -> Path:
    """Return the README of a room."""
    return PACKAGE / room / "README.md"


def map_of(room: str) -> str:
    """Write the map of a room: its purpose, its arrows, and one line a file or room in it."""
    inside = sorted(one for one in FOLDERS if one.rpartition("/")[0] == room)
    files = sorted(path for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__")
    lines = [f"- `{path.name}`: {_first_line(path)}" for path in files]
    lines += [f"- `{one.rpartition('/')[2]}/`: {_purpose(one)}" for one in inside]
    return "\n".join([_purpose(room), "", "```", *arrows_of(room), "```", "", *lines])


def arrows_of(room: str) -> list[str]:
    """List the rooms that a room imports, and those that import it, by the table of rooms."""
    importing = sorted(other for other, imported in ROOMS.items() if room in imported)
    arrows = (("->", sorted(ROOMS[room])), ("<-", importing))
    lines: list[str] = []
    for arrow, others in arrows:
        head = f"{room} {arrow} "
        wrapped = textwrap.wrap("  ".join(others) or "nothing", WIDTH - len(head))
        lines += [head + wrapped[0], *(" " * len(head) + line for line in wrapped[1:])]
    return lines


def rooms_list() -> str:
    """Write the list of the folders that lie in no other one; READMEs have those within."""
    return "\n".join(f"- `{room}/`: {_purpose(room)}" for room in FOLDERS if "/" not in room)


def _purpose(room: str) -> str:
    return _first_line(PACKAGE / room / "__init__.py")


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert text, f"{path} has no docstring"
    return text.splitlines()[0].replace("``", "`")
