"""The tiers hold every test: what `make test` leaves out, `make faults` runs."""

import re
from pathlib import Path

import pytest

from tests.tidy.documents import ROOT
from tests.tiers import (
    CHECK,
    FAULTS,
    LONG,
    REPRESENTATIVES,
    is_long,
    unknown_representatives,
    waits_for_faults,
)


def folders_of(target: str, makefile: str) -> tuple[str, ...]:
    """Read which folders of tests a target runs."""
    (recipe,) = re.findall(rf"^{target}:.*\n\t(.*)$", makefile, re.MULTILINE)
    return tuple(re.findall(r"\btests/\S+", recipe))


@pytest.mark.parametrize(("target", "folders"), [("check", CHECK), ("faults", ()), ("test", ())])
def test_a_target_runs_the_folders_of_its_tier(target: str, folders: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert folders_of(target, makefile) == folders
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert folders_of("check", "check: a\n\tpytest tests/core -q tests/faults $(ARGS)\n") == (
        "tests/core",
        "tests/faults",
    )


def test_what_is_left_to_the_faults_is_what_they_run() -> None:
    found = re.findall(r'(?:TWICE\)|pytest -q) -m "(.*)"', (ROOT / "Makefile").read_text())
    in_check, *others = found
    assert in_check == "not slow and not long"
    tiers = ["not slow and not fault", "fault and not slow", "fault or slow"]
    assert others == [*tiers, "slow or not slow"]
    assert all((ROOT / one).exists() for one in (*FAULTS, *LONG))
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    seen = 'ARGS="-rs --durations=20"'
    assert lines[-2:] == [f"make test {seen}", f"make faults {seen}"]


def test_what_starts_processes_waits_for_the_faults() -> None:
    starts, nothing = ("tmp_path", "zygotes"), ("tmp_path",)
    assert not any(waits_for_faults(one, starts) for one in (*LONG, *REPRESENTATIVES))
    assert is_long(f"{LONG[0]}::test_a[0]")
    for file in ("faults/test_kill.py", "adapters/megatron_lm/test_kill.py"):
        assert waits_for_faults(f"tests/{file}::test_a[0]", starts)
        assert not waits_for_faults(f"tests/{file}::test_a[0]", nothing)
    # Files that are named start processes without fixtures.
    assert waits_for_faults("tests/trainer/test_zygote.py::test_a", nothing)
    for other in ("trainer/test_zygote_of_others", "adapters/test_adam", "faults_of_others/test_a"):
        assert not waits_for_faults(f"tests/{other}.py::test_a", starts)


def test_representatives_exist_and_are_faults() -> None:
    for nodeid in REPRESENTATIVES:
        file, _, name = nodeid.partition("::")
        assert any(Path(file).is_relative_to(folder) for folder in FAULTS), nodeid
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(), nodeid
    (first, *_) = REPRESENTATIVES
    file = first.partition("::")[0]
    # The cases of a test are known when it is collected.
    assert unknown_representatives([first, f"{file}::test_other"]) == []
    assert unknown_representatives([f"{file}::test_other"]) == [first]
    assert unknown_representatives(["tests/core/test_other.py::test_other"]) == []
