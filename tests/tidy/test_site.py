"""The site of docs/ builds without a warning; the demo's picture has what a terminal shows."""

import re
import subprocess
import sys
from pathlib import Path

from tests.idle import completed
from tests.tidy import demo_picture
from tests.tidy.documents import ROOT


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file"]
    words = [*command, str(configuration), "--site-dir", str(site)]
    return completed(words, 100, cwd=ROOT)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.name for path in tmp_path.iterdir()}
    assert "Rules that a test enforces" in (tmp_path / "contributing" / "index.html").read_text()
    # Whoever reads it asks no other server for fonts or scripts.
    asked = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))', pages_text(tmp_path))
    assert asked == []


def pages_text(site: Path) -> str:
    return "".join(path.read_text("utf-8") for path in site.rglob("*.html"))


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](absent.md)\n")
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text(text.split("nav:\n", 1)[0])
    done = build(configuration, tmp_path / "site")
    assert done.returncode == 1 and "absent.md" in done.stderr, done.stderr


def test_picture_shows_the_lines_that_stay() -> None:
    bars = "first\n\x1b[?25l\r\x1b[2Kbar 1\r\x1b[2Ksecond\nbar 1\nbar 2"
    moved = "\r\x1b[2K\x1b[1A\x1b[2K\x1b[31mthird\x1b[0m\nbar 3\x1b[?25h\n"
    assert demo_picture.final_lines(bars + moved) == [
        "first",
        "second",
        "\x1b[31mthird\x1b[0m",
        "bar 3",
        "",
    ]
    svg = demo_picture.picture(["a \x1b[31mred\x1b[0m line"], "title")
    assert ">red<" in svg and ">title<" in svg
    assert "url(http" not in svg and "font-face" not in svg
