"""The TensorBoard and W&B writers that Megatron-LM opens: held by the last rank."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

from elaswave_plugin.tracking.sinks import flush_early
from elaswave_plugin.tracking.tracker import numbers_of

log = logging.getLogger(__name__)

TENSORBOARD, WANDB = "_GLOBAL_TENSORBOARD_WRITER", "_GLOBAL_WANDB_WRITER"
TENSORBOARD_CLOSE, WANDB_CLOSE = (TENSORBOARD, "close"), (WANDB, "finish")


class ScriptWriters:
    """One worker's part in them; nothing where the script has no --tensorboard-dir or W&B project.

    Megatron-LM writes its own rows on the last rank (megatron/training/global_vars.py,
    ``_set_tensorboard_writer``, ``_set_wandb_writer``). Ours go to its W&B run, which is one over
    all its owners, under the same iterations.
    """

    def __init__(
        self, args: Any, openers: Mapping[str, Callable[[Any], None]], run_id: str
    ) -> None:
        """``openers``: Megatron-LM's functions by writer; they look for the last rank themselves.

        The run id is ``run_id`` where WANDB_RUN_ID does not name one.
        """
        self._args = args
        self._openers = openers
        # Later owners append to the run of the first.
        self._environ = {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
        self._is_owner = False
        self._logged = 0
        # One after the other: a worker may be the last rank for less time than opening takes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elaswave-writers")

    def follow(self, *, is_last_rank: bool, waits: bool) -> None:
        """Open them on the last rank of a view, and close them where that is another one now.

        Both take seconds; ``waits``: for them, and raises what they do. Else the rows until then
        are missing, and a failure is a warning: the training goes on.
        """
        opens, self._is_owner = is_last_rank and not self._is_owner, is_last_rank
        if opens and waits:
            self._open()
        elif opens:
            self._thread.submit(self._open).add_done_callback(_warn)
        self._take_away()

    def _take_away(self) -> None:
        """Take the writers from a worker that is no longer the last rank; the thread closes them.

        Only between steps: Megatron-LM may hold one while it logs, and a closed one raises there.
        """
        for name, close in () if self._is_owner else (TENSORBOARD_CLOSE, WANDB_CLOSE):
            writer = getattr(_globals(), name)
            if writer is not None:
                setattr(_globals(), name, None)
                self._thread.submit(getattr(writer, close)).add_done_callback(_warn)

    def step(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Our row of a completed step, once; called before Megatron-LM logs it."""
        self._take_away()
        if iteration > self._logged:
            self._logged = iteration
            self._log(metrics, iteration)

    def event(self, kind: str, iteration: int, fields: Mapping[str, Any]) -> None:
        """The numbers of an event."""
        self._log(numbers_of(kind, fields), iteration)

    def _log(self, metrics: Mapping[str, float], iteration: int) -> None:
        writer = getattr(_globals(), WANDB)
        if self._is_owner and writer is not None:
            writer.log(dict(metrics), iteration)

    def _open(self) -> None:
        if not self._is_owner:
            return
        if getattr(self._args, "wandb_project", ""):
            os.environ.update({k: v for k, v in self._environ.items() if k not in os.environ})
            flush_early()
        for name, opener in self._openers.items():
            if getattr(_globals(), name) is None:
                opener(self._args)


def _warn(done: Future[Any]) -> None:
    if error := done.exception():
        log.warning("the script's TensorBoard or W&B writer cannot follow: %s", error)


def _globals() -> Any:
    # megatron.training is in the repository only, this file's users need not be.
    return import_module("megatron.training.global_vars")
