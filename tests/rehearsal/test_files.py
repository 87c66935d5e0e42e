"""A file of the user's is refused before it is opened; what is saved goes elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elaswave_plugin.rehearsal.files import LedSaves, take_away
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.rehearsal import changed, look_at

GUARDED = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from elaswave_plugin.rehearsal.files import FileGuard
from elaswave_plugin.rehearsal.order import RunOrder
FileGuard(RunOrder.read(Path(sys.argv[1]))).install()
exec(sys.argv[2])
"""
WRITES = {
    "open": "open('{file}', 'w')",
    "append": "open('{file}', 'a')",
    "both ways": "open('{file}', 'r+')",
    "os.open": "import os; os.open('{file}', os.O_WRONLY)",
    "pathlib": "Path('{file}').write_text('new')",
    "remove": "import os; os.remove('{file}')",
    "replace": "import os; open('{file}.new', 'w').close(); os.replace('{file}.new', '{file}')",
    "rename": "import os; os.rename('{file}', '{file}.old')",
    "rmtree": "import shutil; shutil.rmtree(Path('{file}').parent)",
    "truncate": "import os; os.truncate('{file}', 0)",
    "torch.save": "import torch; torch.save([1], '{file}')",
    "safetensors": "import torch; save_file({{'a': torch.ones(1)}}, '{file}')",
    "torch.save by name": "import torch; torch.save(obj=[1], f='{file}')",
}


def guarded(order: RunOrder, code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-c", GUARDED, str(order.write()), code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_would_change_a_file_that_was_there_is_refused(tmp_path: Path, write: str) -> None:
    file = tmp_path / "users" / "results.txt"
    file.parent.mkdir()
    file.write_text("of last week")
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed")
    ended = guarded(order, write.format(file=file))
    assert ended.returncode == 2, ended.stderr
    assert str(file.parent) in ended.stderr
    assert "which was there before the rehearsal" in ended.stderr
    assert file.read_text() == "of last week"
    assert order.refused.read_text() in ended.stderr


def test_with_overwrite_it_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "results.txt"
    file.write_text("of last week")
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed", overwrites=True)
    assert guarded(order, WRITES["pathlib"].format(file=file)).returncode == 0
    assert file.read_text() == "new"


def test_what_the_rehearsal_made_may_be_opened_again(tmp_path: Path) -> None:
    """By another process, as a log that each run appends to; reading is free in any case."""
    file = tmp_path / "log.txt"
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed")
    for _ in range(2):
        ended = guarded(order, f"open('{file}', 'a').write('line'); open({__file__!r}).read()")
        assert ended.returncode == 0, ended.stderr
    assert file.read_text() == "lineline"


def test_what_the_rehearsal_made_may_be_removed(tmp_path: Path) -> None:
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed")
    folder = tmp_path / "new"
    code = f"import shutil; Path('{folder}').mkdir(); Path('{folder}/a').touch()"
    ended = guarded(order, f"{code}; shutil.rmtree('{folder}')")
    assert ended.returncode == 0, ended.stderr
    assert not folder.exists()


@pytest.mark.parametrize("overwrites", [False, True])
def test_what_a_run_made_is_taken_away_before_the_next_one(
    tmp_path: Path, overwrites: bool
) -> None:
    """As the checkpoint that a script would find, and resume from."""
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed", overwrites=overwrites)
    users, kept = tmp_path / "users", tmp_path / "users" / "data.txt"
    users.mkdir()
    kept.write_text("of last week")
    code = f"import torch; Path('{users}/step_3').mkdir(); torch.save([1], '{users}/step_3/a')"
    code += f"; Path('{users}/latest').write_text('3'); Path('{users}/log').touch()"
    for _ in range(2):
        ended = guarded(order, f"assert not Path('{users}/latest').exists(); {code}")
        assert ended.returncode == 0, ended.stderr
        (users / "of another program").touch()
        take_away(order)
        assert sorted(os.listdir(users)) == ["data.txt", "of another program"]
    assert kept.read_text() == "of last week"


@pytest.mark.parametrize("how", ["remove", "rmtree"])
def test_what_was_there_is_never_taken_away(tmp_path: Path, how: str) -> None:
    """Also where --overwrite lets the script remove it, and make it again."""
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed", overwrites=True)
    folder = tmp_path / "users"
    file = folder / "latest"
    folder.mkdir()
    file.write_text("7")
    remove = f"os.remove('{file}')" if how == "remove" else f"shutil.rmtree('{folder}')"
    code = f"import os, shutil; {remove}; os.makedirs('{folder}', exist_ok=True)"
    ended = guarded(order, f"{code}; Path('{file}').write_text('8'); Path('{folder}/new').touch()")
    assert ended.returncode == 0, ended.stderr
    take_away(order)
    assert os.listdir(folder) == ["latest"] and file.read_text() == "8"


def test_the_cache_of_a_library_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torch, which builds DeepSpeed's operations there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built = tmp_path / "cache" / "torch_extensions" / "build.ninja"
    built.parent.mkdir(parents=True)
    built.write_text("rule compile")
    order = RunOrder(folder=tmp_path / "rehearsal", name="undisturbed")
    ended = guarded(order, f"open('{built}', 'w'); open('{built.parent}/new', 'w')")
    assert ended.returncode == 0, ended.stderr
    take_away(order)
    assert (built.parent / "new").exists()


def test_saves_go_below_the_folder(tmp_path: Path) -> None:
    users, ours = tmp_path / "users", tmp_path / "ours"
    users.mkdir()
    (users / "latest").write_text("3")
    before = look_at(users)
    saves = LedSaves(ours / "saves", free=ours)
    saves.begin()
    try:
        target = users / "iter_4"
        target.mkdir(parents=True, exist_ok=True)
        torch.save({"step": 4}, target / "model.pt")
        save_file({"step": torch.ones(1)}, users / "model.safetensors")
        (users / "latest.tmp").write_text("4")
        os.replace(users / "latest.tmp", users / "latest")
        assert os.listdir(target) == ["model.pt"]
        assert (users / "latest").read_text() == "4"
        (users / "iter_2").mkdir()
        shutil.rmtree(users / "iter_2")
    finally:
        saves.end()
    assert changed(before, look_at(users)) == []
    assert (users / "latest").read_text() == "3"
    led = Path(f"{ours / 'saves'}{users}")
    assert (led / "latest").read_text() == "4" and (led / "model.safetensors").is_file()
    assert torch.load(led / "iter_4" / "model.pt") == {"step": 4}


def test_what_changed_in_a_folder_is_named(tmp_path: Path) -> None:
    for name in ("same", "grown", "gone"):
        (tmp_path / name).write_text(name)
    before = look_at(tmp_path)
    assert changed(before, look_at(tmp_path)) == []
    (tmp_path / "grown").write_text("grown more")
    (tmp_path / "gone").unlink()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "new").touch()
    assert changed(before, look_at(tmp_path)) == ["below/new", "gone", "grown"]
