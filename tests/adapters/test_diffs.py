"""The diffs of patches/: each fits the installed source, goes in and out as one, and is shipped."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients
from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
from elaswave_plugin.adapters.megatron_lm.patches import lm_patches
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.cli.patch import Diff, diffs_for, find_tree, read_series
from tests.adapters.megatron_lm.harness import REPOSITORY, needs_repository

ROOT = Path(__file__).resolve().parents[2]
MAX_ADDED_LINES = 10


def sources(folder: Path) -> dict[str, bytes]:
    """Every file of a tree."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def installed_core() -> Path:
    """The folder that has the installed megatron-core."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[2]


@pytest.fixture(
    params=["wheel", pytest.param("checkout", marks=needs_repository)],
)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the files that the diffs change: of the installed core, or of a checkout."""
    source = installed_core() if request.param == "wheel" else Path(REPOSITORY)
    version = find_tree(source).families[0]
    if version not in {diff.family for diff in read_series()}:
        pytest.skip(f"there are no diffs for {version}")
    root = tmp_path / "site-packages"
    changed = {name for diff in diffs_for(find_tree(source)) for name in diff.files}
    for name in ("megatron/core/package_info.py", *changed):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, root / name)
    return root


def test_every_diff_is_short_and_cannot_land_in_a_wrong_place(tree: Path) -> None:
    for diff in diffs_for(find_tree(tree)):
        check_is_short(diff, tree)


def check_is_short(diff: Diff, tree: Path) -> None:
    assert diff.summary and all(diff.field(name) for name in ("Reason", "Valid", "Upstream"))
    (name,) = diff.files
    source = (tree / name).read_text()
    hunks = re.split(r"^@@ .* @@\n", diff.text, flags=re.MULTILINE)[1:]
    assert hunks
    for hunk in hunks:
        taken = "".join(line[1:] for line in hunk.splitlines(True) if line.startswith("-"))
        assert taken and f"\n{source}".count(f"\n{taken}") == 1
    assert sum(line.startswith("+") for line in "".join(hunks).splitlines()) <= MAX_ADDED_LINES


# Replaced in a patched tree as well: a method of a class, a module in the place of a module, and
# what a worker that comes back alone reads with.
WITHOUT_HOOK = {
    "megatron.core.dist_checkpointing:load",
    "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
    "megatron.core.energy_monitor:EnergyMonitor.lap",
    "megatron.core.energy_monitor:EnergyMonitor.get_total",
    "megatron.training.checkpointing:mpu",
}


def test_every_hook_has_its_record_and_every_elastic_record_its_hook(tree: Path) -> None:
    diffs = diffs_for(find_tree(tree))
    scripts = lm_patches(Hooks(lambda config: None)).records
    records = (*elastic_patches(exact=True).records, *WeightGradients().patches.records, *scripts)
    assert {record.target for record in records if record.hook is None} == WITHOUT_HOOK
    hooks = {record.hook.place for record in records if record.hook is not None}
    core = {diff.field("Hook") for diff in diffs if diff.family.startswith("megatron-core/")}
    of_scripts = {place for place in hooks if place.startswith("megatron.training.")}
    assert core == hooks - of_scripts
    if (tree / "megatron" / "training").exists():
        # pretrain's is set when Megatron-LM is imported, before there are records.
        entry = "megatron.training.training:pretrain_hook"
        assert run_command(["patch", "apply", str(tree)]) == 0
        assert set(replaceable_in(tree)) == {*of_scripts, entry}


def replaceable_in(tree: Path) -> Iterator[str]:
    """The hooks that the patched scripts have."""
    for path in (tree / "megatron" / "training").glob("*.py"):
        text = path.read_text()
        names = re.findall(r'^replaceable\(globals\(\), "(\w+)"\)', text, re.MULTILINE)
        for loop in re.findall(r"^for _name in \((.*?)^\)\.split", text, re.MULTILINE | re.DOTALL):
            names += loop.replace('"', "").split()
        # Of a file that the one with `replaceable` imports itself.
        names += re.findall(r"^(\w+)_hook = None$", text, re.MULTILINE)
        yield from (f"megatron.training.{path.stem}:{name}_hook" for name in names)


def test_apply_and_revert_leave_the_bytes_that_were_there(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(verb: str, folder: Path) -> list[str]:
        assert run_command(["patch", verb, str(folder)]) == 0
        return capsys.readouterr().out.splitlines()

    before, names = sources(tree), [diff.name for diff in diffs_for(find_tree(tree))]
    core = tree / "megatron" / "core"
    assert say("check", core) == [f"{name}: not applied, fits" for name in names]
    assert say("apply", core) == [f"applied {name}" for name in names]
    assert say("apply", tree) == ["nothing to do: all are applied already"]
    assert say("check", tree) == [f"{name}: applied" for name in names]
    for path in tree.rglob("*.py"):
        compile(path.read_text(), path.name, "exec")
    assert sources(tree) != before
    assert say("revert", tree / "megatron") == [f"reverted {name}" for name in names]
    assert say("revert", tree) == ["nothing to do: all are reverted already"]
    assert sources(tree) == before


def test_a_repository_around_the_tree_has_no_say(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True, timeout=30)
    before = sources(tree)
    assert run_command(["patch", "apply", str(tree)]) == 0
    assert sources(tree).keys() == before.keys() and sources(tree) != before
    assert run_command(["patch", "revert", str(tree)]) == 0
    assert sources(tree) == before


@pytest.mark.parametrize("verb", ["check", "apply"])
def test_a_file_that_differs_is_named_and_nothing_is_changed(
    tree: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    last = diffs_for(find_tree(tree))[-1]
    path = tree / last.files[0]
    taken = next(line[1:] for line in reversed(last.text.splitlines()) if line.startswith("-"))
    path.write_text(path.read_text().replace(f"\n{taken}\n", f"\n{taken}  # mine\n"))
    before = sources(tree)
    assert run_command(["patch", verb, str(tree)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{last.name} does not fit {tree}: {last.files[0]} has other text at line" in line
    assert sources(tree) == before


def test_another_version_and_no_megatron_are_refused(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text().replace("MINOR = 16", "MINOR = 15"))
    assert run_command(["patch", "apply", str(tree)]) == 2
    assert "is megatron-core/0.15.1, and there are diffs for" in capsys.readouterr().err
    assert run_command(["patch", "apply", str(tmp_path / "nothing")]) == 2
    assert "has no megatron/core/package_info.py" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_changed(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, copies = sources(tree), []

    def full(source: Path, target: Path) -> None:
        if str(target).startswith(str(tree)):
            copies.append(target)
            if len(copies) == 2:
                raise OSError(28, "No space left on device", str(target))
        native(source, target)

    native = shutil.copy
    monkeypatch.setattr(shutil, "copy", full)
    assert run_command(["patch", "apply", str(tree)]) == 2
    assert "(No space left on device); nothing was changed" in capsys.readouterr().err
    assert len(copies) == 2 and sources(tree) == before


def test_list_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["patch", "list"]) == 0
    shown = capsys.readouterr().out
    for diff in read_series():
        assert f"{diff.name}: {diff.summary}" in shown and diff.field("Upstream") in shown


def test_the_package_carries_the_diffs(tmp_path: Path) -> None:
    steps = ("egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    shipped = tmp_path / "elaswave_plugin" / "patches"
    for name in ("series", *(diff.name for diff in read_series())):
        assert (shipped / name).read_bytes() == (ROOT / "patches" / name).read_bytes()
