"""Every command that a page or an example prints is run by a test, or a reason says why not."""

import ast
from pathlib import Path

import pytest

from tests.tidy.page_commands import ROOT, RUN_BY, commands_of, entry_of, pages


def test_every_command_of_a_page_is_run_by_a_test_or_a_reason_says_why_not() -> None:
    found = [(path.name, one) for path in pages() for one in commands_of(path)]
    assert len(found) > 150
    unknown = [(page, one) for page, one in found if entry_of(one) is None]
    assert not unknown, f"no test is named that runs these: {unknown}"
    idle = set(RUN_BY) - {entry_of(one) for _, one in found}
    assert not idle, f"these are printed nowhere any more: {[one.words for one in idle]}"


def test_each_entry_names_a_test_or_a_reason() -> None:
    assert all(bool(one.test) != bool(one.reason) for one in RUN_BY)


@pytest.mark.parametrize("test", sorted({one.test for one in RUN_BY if one.test}))
def test_the_test_that_runs_it_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("```\nelaswave fly DIR    # to the moon\n```\n", ["elaswave fly DIR"]),
        ("```\nelaswave: worker 1 joins\n```\n", []),
        ("```\nA=1 elaswave run \\\n    --x 2 s.py\n```\n", ["A=1 elaswave run --x 2 s.py"]),
        ("Then `elaswave fly\nDIR` goes.\n", ["elaswave fly DIR"]),
        ("```python\nelaswave run x\n```\n\n```\nelaswave fly\n```\n", ["elaswave fly"]),
        ("```json\n{}\n```\n\n```\nelaswave fly DIR\n```\n", ["elaswave fly DIR"]),
    ],
)
def test_a_command_is_found(text: str, commands: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(commands_of(page)) == commands
    assert all(entry_of(one) is None or "fly" not in one for one in commands)
