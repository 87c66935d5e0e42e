"""The memory of the machine that a container leaves."""

from pathlib import Path

import psutil
import pytest

from elaswave_plugin.agent.oom_kills import oom_kills
from elaswave_plugin.snapshot.free_memory import available_bytes


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


def test_groups_of_version_1_count_as_well(tmp_path: Path) -> None:
    """As a container sees them, whose own group is the root of what is mounted there."""
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    for folder, limit in ((groups / "memory", 5000), (groups / "memory" / "box", 1 << 63)):
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("4400\n")
        (folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100\n")
    for path in ("/box", "/docker/elsewhere"):
        own.write_text(f"4:cpu,cpuacct:/x\n3:memory,hugetlb:{path}\n")
        assert available_bytes(groups, own) == 700


def test_what_the_kernel_ended_for_lack_of_memory_is_counted(tmp_path: Path) -> None:
    groups, own, machine = tmp_path / "cgroup", tmp_path / "own", tmp_path / "vmstat"
    (groups / "box").mkdir(parents=True)
    (groups / "memory" / "box").mkdir(parents=True)
    assert oom_kills(groups, own, machine) == 0
    machine.write_text("nr_free_pages 5\noom_kill 1\n")
    own.write_text("0::/box\n")
    (groups / "box" / "memory.events").write_text("oom 9\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(groups, own, machine) == 3
    own.write_text("2:memory:/box\n")
    control = groups / "memory" / "box" / "memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(groups, own, machine) == 4


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    group(groups / "box", "max", 5, 0)
    own.write_text("0::/box\n")
    # What cannot be read limits nothing.
    (groups / "memory.max").mkdir()
    found = available_bytes(groups, own)
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert available_bytes(groups, tmp_path / "none") > 0
