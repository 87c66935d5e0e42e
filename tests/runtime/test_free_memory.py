"""What a container leaves of the machine's memory."""

from pathlib import Path

import psutil
import pytest

from elaswave_plugin.runtime.free_memory import available_bytes


def group(folder: Path, limit: str, current: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nslab 2\n")


@pytest.mark.parametrize(
    ("outer", "inner", "left"),
    [
        (("max", 9000, 0), ("1000", 400, 100), 700),
        (("2000", 1500, 0), ("1000", 400, 100), 500),
        (("2000", 100, 0), ("1000", 1200, 0), 0),
    ],
)
def test_the_tightest_group_counts(
    tmp_path: Path, outer: tuple[str, int, int], inner: tuple[str, int, int], left: int
) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    group(groups / "pod", *outer)
    group(groups / "pod" / "box", *inner)
    own.write_text("3:cpu:/elsewhere\n0::/pod/box\n")
    assert available_bytes(groups, own) == left


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    group(groups / "box", "max", 5, 0)
    own.write_text("0::/box\n")
    # What cannot be read limits nothing.
    (groups / "memory.max").mkdir()
    found = available_bytes(groups, own)
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert available_bytes(groups, tmp_path / "none") > 0
