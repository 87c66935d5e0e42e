"""`elaswave checkpoint DIR`: lists the checkpoints of a directory, and says which can be read."""

from collections.abc import Iterator
from pathlib import Path

from elaswave_plugin.checkpoints.directory import CheckpointDirectory, read_directory
from elaswave_plugin.errors import CheckpointUnreadableError, ConfigurationError


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
