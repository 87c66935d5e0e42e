"""Refuses to load what cannot be read, before anything is read from it."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from elaswave_plugin.checkpoints.directory import CheckpointDirectory, read_directory
from elaswave_plugin.errors import CheckpointUnreadableError
from elaswave_plugin.values.gathered import told_by


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
