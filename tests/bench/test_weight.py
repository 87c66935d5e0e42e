"""Statements are counted by room, docstrings not."""

from pathlib import Path

import pytest

from benchmarks.weight import main, rooms, statements


def test_a_docstring_and_a_comment_are_no_statements() -> None:
    bare = "class A:\n    x = 1\n    def f(self):\n        return 1\n"
    told = '"M."\nclass A:\n    "A."\n    x = 1\n    "X."\n    # why\n    def f(self):\n'
    assert statements(bare) == statements(told + '        "F."\n        return 1\n') == 4
    assert statements(bare + "y = 1; z = 2\n") == 6


def test_rooms_are_folders_and_add_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("x = 1\n")
    (tmp_path / "a" / "two.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "three.py").write_text("pass\n")
    assert rooms(tmp_path) == {"a": 3, ".": 1}


def test_the_command_prints_each_room_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    *lines, last = capsys.readouterr().out.splitlines()
    counts = [int(line.split()[0].replace(",", "")) for line in lines]
    assert last.split() == [f"{sum(counts):,}", "all"] and sum(counts) > 30_000
    assert "core/step" in {line.split()[1] for line in lines}
