"""The lines about checkpoints that were torn, cut or never named."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from elaswave_plugin.checkpoints.directory import (
    MEGATRON_TRACKER,
    check_loadable,
    list_checkpoints,
    read_directory,
)
from elaswave_plugin.checkpoints.draft import (
    Attempt,
    begin_draft,
    begin_pointer,
    discard_drafts,
    pointing_to,
    publish,
)
from elaswave_plugin.checkpoints.failures import storage_failure
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.errors import CheckpointUnreadableError, ConfigurationError


def write_iteration(folder: Path) -> None:
    """A checkpoint of two tensors in the torch_dist format."""
    folder.mkdir(parents=True)
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, 5)}
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({"iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text("{}")


def attempt(epoch: int) -> Attempt:
    return Attempt("ab", epoch, ask=lambda: None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with two whole checkpoints; the tracker names the second."""
    for number in (2, 4):
        write_iteration(tmp_path / f"iter_{number:07d}")
    (tmp_path / MEGATRON_TRACKER).write_text("4")
    return tmp_path


def damaged(name: str, damage: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda saved: damage(saved / "iter_0000004" / name) and None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def forget_an_entry(file: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_data.popitem()
    file.write_bytes(pickle.dumps(metadata))


def tracker(saved: Path) -> Path:
    return saved / MEGATRON_TRACKER


DAMAGES = {
    "cut": (damaged("__0_0.distcp", cut), "__0_0.distcp has"),
    "longer": (damaged("__0_0.distcp", lengthen), "__0_0.distcp has"),
    "no data": (damaged("__0_0.distcp", Path.unlink), "__0_0.distcp is missing"),
    "no metadata": (damaged(".metadata", Path.unlink), ".metadata is missing"),
    "half a metadata": (damaged(".metadata", cut), ".metadata cannot be read"),
    "an entry less": (damaged(".metadata", forget_an_entry), "has no entry of"),
    "no configuration": (damaged("metadata.json", Path.unlink), "metadata.json is missing"),
    "no common state": (damaged("common.pt", Path.unlink), "common.pt is missing"),
    "half a common state": (damaged("common.pt", cut), "common.pt ("),
    "no number": (
        lambda saved: tracker(saved).write_text(""),
        "has '', wanted a number",
    ),
    "no folder": (
        lambda saved: tracker(saved).write_text("6"),
        "iter_0000006 is missing",
    ),
    "no tracker": (
        lambda saved: tracker(saved).unlink(),
        f"{MEGATRON_TRACKER} is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_read_is_named_with_the_newest_that_can(saved: Path, damage: str) -> None:
    strike, said = DAMAGES[damage]
    strike(saved)
    newest = 4 if damage in ("no number", "no folder", "no tracker") else 2
    with pytest.raises(CheckpointUnreadableError) as raised:
        check_loadable(saved)
    assert said in str(raised.value)
    assert f"iter_{newest:07d}: to load it, write {newest} into" in str(raised.value)


def test_a_whole_checkpoint_and_an_empty_folder_are_loaded(saved: Path, tmp_path: Path) -> None:
    check_loadable(saved)
    check_loadable(saved, step=2)
    check_loadable(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    check_loadable(tmp_path / "empty")
    check_loadable(None)
    with pytest.raises(CheckpointUnreadableError, match="iter_0000003 is missing"):
        check_loadable(saved, step=3)


def test_where_nothing_is_whole_that_is_said(tmp_path: Path) -> None:
    write_iteration(tmp_path / "iter_0000002")
    (tmp_path / MEGATRON_TRACKER).write_text("2")
    cut(tmp_path / "iter_0000002" / "__0_0.distcp")
    with pytest.raises(CheckpointUnreadableError, match=r"no checkpoint in .* is whole"):
        check_loadable(tmp_path)


def test_a_first_save_that_was_cut_off_is_a_start_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002.part-abc-1").mkdir()
    check_loadable(tmp_path)


def test_the_command_lists_and_checks(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_draft(saved / "iter_0000006", attempt(2))
    assert run_command(["checkpoint", str(saved)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "iter_0000002: whole",
        "iter_0000004: whole, named by the tracker",
        "iter_0000006.part-ab-2: left by a save that did not come to its end; nothing names it",
    ]
    cut(saved / "iter_0000004" / "__0_0.distcp")
    assert run_command(["checkpoint", str(saved)]) == 1
    assert "iter_0000004: cannot be read: " in capsys.readouterr().out
    assert run_command(["checkpoint", str(saved / "nothing")]) == 2
    assert run_command(["checkpoint", str(saved / "iter_0000002")]) == 2


def test_a_tag_of_deepspeed(tmp_path: Path) -> None:
    for number in (2, 4):
        tag = tmp_path / f"global_step{number}"
        tag.mkdir()
        for name in ("mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_optim"):
            torch.save({}, tag / f"{name}_states.pt")
        torch.save({}, tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (tmp_path / "latest").write_text("global_step4")
    check_loadable(tmp_path)
    first = tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = first.read_bytes()
    first.write_bytes(whole[:-20])
    with pytest.raises(CheckpointUnreadableError, match=r"not written to its end.*global_step2"):
        check_loadable(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointUnreadableError, match=r"zero_pp_rank_0_.* is missing"):
        check_loadable(tmp_path)
    check_loadable(tmp_path, tag="global_step2")
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointUnreadableError, match="has '', wanted the name of a tag"):
        check_loadable(tmp_path)
    found = read_directory(tmp_path)
    assert found is not None and [one.number for one in found.checkpoints] == [2, 4]


def test_a_folder_without_checkpoints_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no checkpoint"):
        list(list_checkpoints(tmp_path))


def test_a_folder_of_folders_lists_what_each_has(tmp_path: Path) -> None:
    """As HF Accelerate lays its saves out: checkpoints/checkpoint_0/pytorch_model."""
    (tmp_path / "logs").mkdir()
    for number in range(2):
        tag = tmp_path / f"checkpoint_{number}" / "pytorch_model"
        tag.mkdir(parents=True)
        for name in ("mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_optim"):
            torch.save({}, tag / f"{name}_states.pt")
        (tag.parent / "latest").write_text(tag.name)
    assert list(list_checkpoints(tmp_path)) == [
        f"checkpoint_{number}/pytorch_model: whole, named by the tracker" for number in range(2)
    ]


@pytest.mark.parametrize("former", [None, {}, {"old": "1"}])
def test_a_draft_takes_its_place_whatever_is_there(
    tmp_path: Path, former: dict[str, str] | None
) -> None:
    place = tmp_path / "iter_0000002"
    if former is not None:
        place.mkdir()
        for name, text in former.items():
            (place / name).write_text(text)
    begin_draft(place, attempt(1))
    draft = begin_draft(place, attempt(2))
    (draft / "new").write_text("2")
    publish(place, attempt(2))
    assert [path.name for path in place.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_without_an_exchange_of_names_the_former_one_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaswave_plugin.checkpoints.draft._exchange", lambda *names: False)
    test_a_draft_takes_its_place_whatever_is_there(tmp_path, {"old": "1"})


def test_what_is_discarded_leaves_an_earlier_checkpoint_alone(saved: Path) -> None:
    begin_draft(saved / "iter_0000004", attempt(1))
    discard_drafts(saved / "iter_0000004", attempt(1))
    check_loadable(saved)
    (saved / "iter_0000006").mkdir()
    begin_draft(saved / "iter_0000006", attempt(1))
    discard_drafts(saved / "iter_0000006", attempt(2))
    assert sorted(path.name for path in saved.iterdir()) == [
        *("iter_0000002", "iter_0000004"),
        MEGATRON_TRACKER,
    ]


def test_a_pointer_changes_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    pointer = tmp_path / "latest"
    pointer.write_text("old")

    def fail() -> None:
        begin_pointer(pointer, attempt(1))
        with pointing_to(pointer, attempt(1)) as file:
            file.write("half")
            file.flush()
            assert pointer.read_text() == "old"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert pointer.read_text() == "old"
    begin_pointer(pointer, attempt(1))
    with pointing_to(pointer, attempt(1)) as file:
        file.write("new")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert pointer.read_text() == "new"


def test_only_the_storage_is_forgiven(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    assert storage_failure(OSError(28, "No space left on device")) == (
        "[Errno 28] No space left on device"
    )
    assert storage_failure(TypeError("no")) is None
    assert storage_failure(RuntimeError("shape '[2]' is invalid")) is None
    torn = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert storage_failure(torn, tmp_path / "nothing") == str(torn)
    assert storage_failure(CheckpointException("write", {})) == ""
    reason = RuntimeError("Worker failure: [Errno 28] No space left on device")
    assert storage_failure(CheckpointException("write", {2: (reason, None)})) == str(reason)  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
