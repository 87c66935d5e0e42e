"""Draws what a real `elaswave demo` prints: python -m tests.tidy.demo_picture [docs/demo.svg]."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.circumstances import described_commit
from tests.tidy.documents import ROOT

COLUMNS = 100
LIMIT_S = 600
# Erase the line, go up a line, show or hide the cursor: all that rich's bars use.
MOVES = re.compile(r"(\x1b\[2K|\x1b\[\d*A|\x1b\[\?25[lh]|\r|\n)")


def final_lines(output: str) -> list[str]:
    """Return the lines that a terminal shows at the end, with their colours."""
    lines, row = [""], 0
    for part in MOVES.split(output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b[") and part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif not MOVES.fullmatch(part):
            lines[row] += part
    return lines


def picture(lines: list[str], title: str) -> str:
    """Return the lines as SVG, which asks for no font of another server."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines).strip("\n")))
    svg = console.export_svg(title=title, unique_id="demo")
    return re.sub(r"\s*@font-face \{[^}]*\}", "", svg)


def main(path: Path) -> None:
    """Run the demo and write the picture. Raises CalledProcessError where the demo fails."""
    terminal = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "demo"]
    done = subprocess.run(
        command,
        env=os.environ | terminal,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    where = f"{os.cpu_count()} CPU cores, no GPU, {time.strftime('%Y-%m-%d')}"
    title = f"elaswave demo ({where}, commit {described_commit()})"
    path.write_text(picture(final_lines(done.stdout.decode()), title), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "demo.svg")
