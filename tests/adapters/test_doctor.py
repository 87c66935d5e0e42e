"""elaswave doctor: every record fits what is installed, and one that does not is named."""

import io
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elaswave_plugin.adapters.patching import Hook, PatchRecord
from elaswave_plugin.cli import doctor
from elaswave_plugin.cli.doctor import FITS, MISMATCH, Entry, Finding, show
from elaswave_plugin.cli.main import run_command
from tests.adapters.megatron_lm.harness import (
    REPOSITORY,
    SCRIPTS_FIT,
    needs_repository,
    needs_scripts,
)


def states(done: "subprocess.CompletedProcess[str]") -> dict[str, set[str]]:
    """The states of the records of each distribution; all fit, or the test fails."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["holds"] is True
    assert set(said["extensions"]) == {"transformer-engine", "apex"}
    found: dict[str, set[str]] = {}
    for one in said["records"]:
        found.setdefault(one["distribution"], set()).add(one["state"])
    return found


@needs_scripts
def test_every_record_fits_what_is_installed(doctor: "subprocess.CompletedProcess[str]") -> None:
    found = states(doctor)
    frameworks = {"torch", "megatron-core", "deepspeed", "accelerate", "transformers", "trl"}
    assert frameworks == set(found)
    assert found.pop("megatron-core") == {"fits", "no checkout"}
    assert set.union(*found.values()) <= {"fits", "not installed"}


def test_beyond_the_scripts_every_record_fits(doctor: "subprocess.CompletedProcess[str]") -> None:
    records = json.loads(doctor.stdout)["records"]
    ours = [one for one in records if not one["applied"].endswith("Megatron-LM")]
    assert {one["state"] for one in ours} <= {"fits", "not needed", "not installed"}
    assert "megatron-core" in {one["distribution"] for one in ours if one["state"] == "fits"}
    if not SCRIPTS_FIT:
        assert doctor.returncode == 2
        assert "refused are jobs that apply them: elastic, Megatron-LM\n" in doctor.stderr


@needs_repository
def test_every_record_fits_the_repository() -> None:
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "doctor", "--json"]
    done = subprocess.run(
        [*command, "--megatron-lm", REPOSITORY],
        capture_output=True,
        text=True,
        timeout=90,
        env=dict(os.environ),
    )
    assert set.union(*states(done).values()) <= {"fits", "not needed", "not installed"}


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function and a hook; two records of it are all that there is to examine."""
    module: Any = types.ModuleType("some_framework")
    module.function = lambda first, second=0: first
    module.function_hook = None
    monkeypatch.setitem(sys.modules, "some_framework", module)
    record = PatchRecord(
        target="some_framework:function",
        reason="a test",
        distribution="pytest",
        valid=">=1",
        parameters=("first", "second"),
        make=lambda native: native,
        hook=Hook("some_framework:function_hook", lambda native: native),
    )
    absent = PatchRecord(
        target="nowhere:function",
        reason="a test",
        distribution="no-such-thing",
        valid=">=1",
        make=lambda native: native,
    )
    found = (Entry(record, "elastic"), Entry(absent, "elastic"))
    monkeypatch.setattr(doctor, "read_ledger", lambda: found)
    return module


def test_a_hook_and_what_is_not_installed_are_said(
    examined: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    assert run_command(["doctor", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [record["state"] for record in records] == ["hook", "not installed"]
    assert examined.function_hook is None
    del examined.function_hook
    assert run_command(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert "fits" in screen and "apex: " in screen and "transformer-engine: " in screen


@pytest.mark.parametrize("state", [FITS, MISMATCH])
def test_the_screen_has_a_row_a_package_and_ends_with_a_verdict(state: str) -> None:
    one = Finding(
        target=f"{'a_package.' * 20}a_module:function",
        distribution="megatron-core",
        installed="0.16.1",
        valid=">=0.16.1,<0.20",
        applied="elastic",
        reason="a long reason " * 20,
        hook=None,
        state=state,
    )
    console = Console(file=io.StringIO(), width=80)
    show([one, one, replace(one, state=FITS)], console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    counted = "3 fits" if state == FITS else "2 mismatch, 1 fits"
    assert len([line for line in lines if "megatron-core" in line and counted in line]) == 1
    assert max(map(len, lines)) <= 80
    good, bad = "every record that is checked fits", "records do not fit"
    assert lines[-1] == f"verdict: {good if state == FITS else bad} what is installed ({counted})"


def test_a_record_that_does_not_fit_is_named_with_exit_code_2(
    examined: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    examined.function = lambda first, third: first
    for options in ([], ["--json"]):
        assert run_command(["doctor", *options]) == 2
        shown = capsys.readouterr()
        (line,) = shown.err.splitlines()
        assert line.startswith("elaswave: some_framework:function takes ('first', 'third')")
        assert f"pytest {pytest.__version__}, wanted ('first', 'second')" in line
    assert json.loads(shown.out)["holds"] is False


def test_a_checkout_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    core = tmp_path / "megatron" / "core"
    core.mkdir()
    (core / "__init__.py").write_text("import a_module_of_a_newer_release")
    command = [sys.executable, "-m", "elaswave_plugin.cli.main", "doctor", "--megatron-lm"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"with {tmp_path} first cannot be imported: No module named 'a_module_of" in done.stderr


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", "--megatron-lm", str(tmp_path)]) == 2
    assert "has no folder megatron/training" in capsys.readouterr().err
