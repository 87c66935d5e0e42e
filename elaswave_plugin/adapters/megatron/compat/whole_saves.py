"""Checkpoints of Megatron-Core's dist_checkpointing: written beside their place, checked, named.

What outlives an attempt at a save in ``megatron.core.dist_checkpointing``, and what becomes of it:

- ``strategies.filesystem_async._results_queue``: one queue of write results for all saves of a
  process. An interrupted attempt leaves its results there, and every later save would take those of
  the one before: its index would describe other files. Each attempt gets a queue of its own.
- files of the attempt: in a folder that no other attempt writes to; see ``recovery/drafts.py``.
- processes that write them: they end before a survivor leaves the save, since it waits for them;
  those of a lost worker are ended with it (``ipc/process_tree.py``).
- plans and metadata that a strategy keeps from save to save, and the strategy of a load, whose
  metadata a save may take over: strategies that Megatron-LM keeps are dropped before each save
  (``forget_strategies``), since after a loss others write other parts.
- ``strategies.base.async_calls``: of asynchronous saves only, which are refused.
- ``CachedMetadataFileSystemReader._metadata_cache`` (0.17 on): of loads, by path; none loads what
  the same job has saved.
"""

import queue
from collections.abc import Callable, MutableMapping
from inspect import signature, unwrap
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from elaswave_plugin.adapters.megatron.compat.versions import record
from elaswave_plugin.adapters.patching import Hook, PatchRecord
from elaswave_plugin.around import around
from elaswave_plugin.checkpoints.torch_dist import flaw_of
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.drafts import Drafts
from elaswave_plugin.values.set_within import set_within


class WholeSaves:
    """The replacements of ``dist_checkpointing.save`` while a job trains, and of its loads."""

    def __init__(self, *, tracker: str | None = None) -> None:
        """``tracker``: the name of the file that the job's script opens once a save is done."""
        self._tracker = tracker
        # None until the job has its loop: a save before that is Megatron-Core's own.
        self.drafts: Drafts | None = None
        # True while this worker builds its model beside the training of the others.
        self.comes_later: Callable[[], bool] = lambda: False
        # How a save of a state is made that the script calls in its loop itself.
        self.between_steps: Callable[[Callable[[], None], Any], object] = lambda write, state: (
            write()
        )
        self._inside = False
        # The folders of the checkpoints that the script has loaded.
        self.loaded: list[str] = []

    def save(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Write beside the place, and give the name when it is whole.

        Raises ConfigurationError for an asynchronous save and for storage that is no file system,
        OSError for what cannot be written.
        """
        if self.drafts is None:
            native(*args, **kwargs)
            return
        call = signature(native).bind(*args, **kwargs)
        place = str(call.arguments["checkpoint_dir"])
        if call.arguments.get("async_sharded_save"):
            raise ConfigurationError(
                "dist_checkpointing.save was called with async_sharded_save, and nothing waits "
                "for such a save, so that a loss would tear it; leave async_sharded_save out"
            )
        if "://" in place:
            raise ConfigurationError(
                f"a checkpoint was to be saved to {place!r}, wanted a folder of a file system: "
                "it gets its name when it is whole, by renaming its folder"
            )

        def write(draft: Path) -> None:
            call.arguments["checkpoint_dir"] = str(draft)
            with set_within(self, "_inside", True):
                native(*call.args, **call.kwargs)

        pointer = None if self._tracker is None else Path(place).with_name(self._tracker)
        drafts, state = self.drafts, call.arguments["sharded_state_dict"]
        self.between_steps(
            lambda: drafts.write(Path(place), write, flaw_of, pointer=pointer), state
        )

    def _load(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A worker that comes later meets nobody there."""
        call = signature(native).bind(*args, **kwargs)
        self.loaded.append(str(call.arguments["checkpoint_dir"]))
        if self.comes_later():
            call.arguments["validate_access_integrity"] = False
        return native(*call.args, **call.kwargs)

    def _read(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = signature(native).bind(*args, **kwargs)
        if self.comes_later():
            call.arguments["no_dist"] = True
        return native(*call.args, **call.kwargs)

    def _begin(self) -> None:
        """A strategy of the torch_dist format begins to save."""
        if self.drafts is not None and not self._inside:
            raise ConfigurationError(
                "a checkpoint was saved past dist_checkpointing.save, by a name that was imported "
                "before the job was attached or by a strategy itself, so that a loss would tear it;"
                " call dist_checkpointing.save(...) of `from megatron.core import "
                "dist_checkpointing`"
            )
        forget_results()

    def _beginning(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return native(*args, **kwargs)

    def records(self) -> list[PatchRecord]:
        """The patch records of any job."""
        package = "megatron.core.dist_checkpointing"
        strategies = f"{package}.strategies.torch"
        return [
            record(
                f"{package}:save",
                around(self.save),
                "a checkpoint gets its name when everyone has written and it was checked",
                hook=Hook(f"{package}:save_hook", lambda save: around(self.save)(unwrap(save))),
            ),
            record(
                f"{strategies}:TorchDistSaveShardedStrategy.async_save",
                around(self._beginning),
                "what an interrupted save had written is no result of the next one",
                hook=Hook(f"{strategies}:begin_save_hook", lambda method: self._begin),
            ),
            record(
                f"{package}:load",
                around(self._load),
                "a worker that comes back finds a checkpoint, and nobody to load it with",
            ),
            record(
                "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
                around(self._read),
                "a worker that comes back has nobody to plan its reads with",
                *("state_dict", "storage_reader", "process_group", "coordinator_rank", "no_dist"),
                "planner",
            ),
        ]


def forget_results() -> None:
    """Give the next save a queue of its own for the results of its writers.

    A save that is waited for puts them in and takes them out in one process, which needs none of
    the processes that Megatron-Core starts to carry them.
    """
    filesystem_async._results_queue = queue.Queue()


def forget_strategies(kept: MutableMapping[str, Any]) -> None:
    """Drop the strategies that Megatron-LM keeps in its ``checkpointing_context``."""
    for name in ("save_strategy", "load_strategy"):
        kept.pop(name, None)
