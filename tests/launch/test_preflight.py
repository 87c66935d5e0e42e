"""The run directory of a job: whose it is."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_plugin.launch.options import open_run_dir


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_run_directory_is_its_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "job"
    open_run_dir(folder)
    assert _mode(folder) == 0o700
    # What is above it is a place for others too.
    assert _mode(folder.parent) == 0o755
    open_run_dir(folder)
    assert list(folder.iterdir()) == []


def test_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(0o750)
    open_run_dir(folder)
    assert _mode(folder) == 0o750
