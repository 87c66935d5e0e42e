"""The checkpoints in a directory: which are whole, and may be loaded."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from elaswave_plugin.checkpoints import deepspeed_tag, legacy, torch_dist
from elaswave_plugin.checkpoints.draft import is_draft
from elaswave_plugin.errors import CheckpointUnreadableError, ConfigurationError
from elaswave_plugin.values.plain import told_by

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One folder that a tracker can name."""

    folder: Path
    # Iteration, or the number in a tag; -1 where there is none.
    number: int
    check: Callable[[Path], str | None]

    @cached_property
    def flaw(self) -> str | None:
        """The reason for which it cannot be read, None where it is whole."""
        return self.check(self.folder)


@dataclass(frozen=True)
class CheckpointDirectory:
    """The checkpoints of one directory, oldest first, and what its tracker says."""

    tracker: Path
    # The tracker's text; None without a tracker.
    text: str | None
    checkpoints: tuple[Checkpoint, ...]
    # What saves left that did not come to their end.
    unfinished: tuple[Path, ...]

    @property
    def named(self) -> Path | None:
        """The folder that the tracker names; None where it names none."""
        if self.text is None:
            return None
        if self.tracker.name == DEEPSPEED_TRACKER:
            return self.tracker.parent / self.text if self.text else None
        if self.text == _RELEASE:
            return self.tracker.parent / _RELEASE
        return self.tracker.parent / f"iter_{int(self.text):07d}" if self.text.isdigit() else None

    @property
    def newest_whole(self) -> Checkpoint | None:
        """The newest one that can be read."""
        return next((one for one in reversed(self.checkpoints) if one.flaw is None), None)

    def flaw_of_named(self) -> str | None:
        """Say why what the tracker names cannot be read; None where it can, or nothing is named."""
        if self.text is None:
            return None
        if self.named is None:
            wanted = "the name of a tag" if self.tracker.name == DEEPSPEED_TRACKER else "a number"
            return f"{self.tracker} has {self.text!r}, wanted {wanted}"
        return self.flaw_at(self.named)

    def flaw_at(self, folder: Path) -> str | None:
        """Say why the checkpoint in a folder cannot be read, None where it can."""
        if not folder.is_dir():
            return f"{folder} is missing"
        found = next((one for one in self.checkpoints if one.folder == folder), None)
        return None if found is None else found.flaw


def read_directory(directory: Path) -> CheckpointDirectory | None:
    """Look at a directory that Megatron-LM or DeepSpeed saves to; None where there is neither's.

    Raises OSError where it cannot be read.
    """
    folders = sorted(path for path in directory.iterdir() if path.is_dir())
    finished = [folder for folder in folders if not is_draft(folder)]
    megatron = [_of_megatron(folder) for folder in finished]
    deepspeed = [_of_deepspeed(folder) for folder in finished]
    for name, found in ((MEGATRON_TRACKER, megatron), (DEEPSPEED_TRACKER, deepspeed)):
        tracker = directory / name
        checkpoints = [one for one in found if one is not None]
        if tracker.is_file() or checkpoints:
            return CheckpointDirectory(
                tracker=tracker,
                text=tracker.read_text().strip() if tracker.is_file() else None,
                checkpoints=tuple(sorted(checkpoints, key=lambda one: one.number)),
                unfinished=tuple(folder for folder in folders if is_draft(folder)),
            )
    return None


def _of_megatron(folder: Path) -> Checkpoint | None:
    """Read one of the format torch_dist, or of the format torch, with folders of ranks."""
    named = _ITERATION.fullmatch(folder.name)
    if named is None and folder.name != _RELEASE:
        return None
    is_legacy = any(path.name.startswith(legacy.RANKS) for path in folder.iterdir())
    check = legacy.flaw_of if is_legacy else torch_dist.flaw_of
    return Checkpoint(folder, int(named[1]) if named else -1, check)


def _of_deepspeed(folder: Path) -> Checkpoint | None:
    if not any(folder.glob("*_states.pt")):
        return None
    numbers = re.findall(r"\d+", folder.name)
    return Checkpoint(folder, int(numbers[-1]) if numbers else -1, deepspeed_tag.flaw_of)


def list_checkpoints(directory: Path) -> Iterator[str]:
    """Yield a line for each checkpoint of a folder, or of the folders in it, oldest first.

    Raises ConfigurationError where there is none, CheckpointUnreadableError at the end where what
    the tracker names cannot be loaded.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is no folder; give the one that --save names")
    found = read_directory(directory)
    if found is not None:
        yield from _lines(found)
        return
    # HF Accelerate makes a folder for each of its saves.
    parts = [one for one in sorted(directory.iterdir()) if one.is_dir()]
    inside = {part.name: below for part in parts if (below := read_directory(part)) is not None}
    if not inside:
        raise ConfigurationError(
            f"{directory} has no checkpoint of Megatron-Core (iter_*) or DeepSpeed; give the folder"
            " that --save names"
        )
    for name, below in inside.items():
        yield from (f"{name}/{line}" for line in _lines(below))


def _lines(found: CheckpointDirectory) -> Iterator[str]:
    """Raises CheckpointUnreadableError at the end, as above."""
    for one in found.checkpoints:
        tracked = ", named by the tracker" if one.folder == found.named else ""
        state = "whole" if one.flaw is None else f"cannot be read: {one.flaw}"
        yield f"{one.folder.name}: {state}{tracked}"
    for folder in found.unfinished:
        yield f"{folder.name}: left by a save that did not come to its end; nothing names it"
    flaw = _flaw(found)
    if flaw is not None:
        raise CheckpointUnreadableError(flaw)


def _flaw(found: CheckpointDirectory) -> str | None:
    return f"{found.tracker} is missing" if found.text is None else found.flaw_of_named()


def check_loadable(
    directory: str | Path | None, *, step: int | None = None, tag: str | None = None
) -> None:
    """Raise CheckpointUnreadableError for a checkpoint that the frameworks could not load.

    ``step`` and ``tag`` stand in for what the tracker names. A directory without a checkpoint is
    none of our business: both frameworks begin from scratch then, and say so.
    """
    if directory is None or not Path(directory).is_dir():
        return
    found = read_directory(Path(directory))
    if found is None:
        return
    if step is not None or tag is not None:
        flaw = found.flaw_at(found.tracker.parent / (tag or f"iter_{step:07d}"))
    elif found.text is None:
        flaw = _flaw_of_none(found)
    else:
        flaw = found.flaw_of_named()
    if flaw is not None:
        raise CheckpointUnreadableError(f"{flaw}; {_way_out(found)}")


def check_everywhere(check: Callable[[], None]) -> None:
    """Have rank 0 check and tell all (collective where torch.distributed is initialized)."""
    if not dist.is_initialized():
        return check()
    said: str | None = None
    if dist.get_rank() == 0:
        try:
            check()
        except CheckpointUnreadableError as error:
            said = str(error)
    said = told_by(0, said)
    if said is not None:
        raise CheckpointUnreadableError(said)


def _flaw_of_none(found: CheckpointDirectory) -> str | None:
    """A job that begins from scratch beside a checkpoint would throw it away, silently."""
    return None if found.newest_whole is None else f"{found.tracker} is missing"


def _way_out(found: CheckpointDirectory) -> str:
    whole = found.newest_whole
    if whole is None:
        return f"no checkpoint in {found.tracker.parent} is whole"
    name = str(whole.number) if whole.folder.name.startswith("iter_") else whole.folder.name
    return (
        f"the newest whole checkpoint is {whole.folder}: to load it, write {name} into "
        f"{found.tracker}"
    )
