"""The W&B run that a script opens on rank 0, which goes on where rank 0 is after a loss."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elaswave_plugin.ipc.progress_page import phase
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.only_said import only_said
from elaswave_plugin.tracking.sinks import FLUSH_INTERVAL_S, history_rows
from elaswave_plugin.values.plain import gathered

_SILENT = "the W&B run of the script is silent from here on"


def lose_little() -> None:
    """Have runs that the script opens write their rows soon, as a killed process loses the rest."""
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH_INTERVAL_S))


class ScriptRun:
    """One worker's part in it: the present rank 0 has it open, as ``wandb.run``."""

    def __init__(self, worker: Worker) -> None:
        """Learn what names the run (collective over WORLD, except on a worker that comes later)."""
        self._worker = worker
        if not worker.detached:
            worker.remember(trackers=gathered(_open_run(), "the script's W&B run")[0])
        self._run: dict[str, Any] = worker.job_constants["trackers"]

    def follow(self) -> None:
        """Close the run where rank 0 was, and open it where that is now; what fails is said.

        Collective over WORLD.
        """
        if not self._run or self._worker.config.wandb != "off":
            return
        is_first, mine = self._worker.owns_rank_0, _open_run()
        with phase("trackers"):
            # A script may have a run of each worker's own.
            if not is_first and mine.get("id") == self._run["id"]:
                only_said(import_module("wandb").finish, what=_SILENT)
            # By now its files have all rows.
            dist.barrier()
            if is_first and not mine:
                only_said(self._open, what=_SILENT, otherwise=_log_nowhere)

    def _open(self) -> None:
        """Append to the run, behind the rows that it has."""
        wandb, run = import_module("wandb"), self._run
        root = Path(run["folder"]).parents[1]
        if root.is_dir():
            os.environ["WANDB_DIR"] = str(root)
        named = {name: run[name] for name in ("id", "project", "entity")}
        mode = "offline" if run["is_offline"] else "online"
        opened = wandb.init(**named, resume="allow", mode=mode)
        had = [row["_step"] + 1 for row in history_rows(root, run["id"])]
        # W&B drops rows that are not behind those before.
        opened.log({}, step=max([opened.starting_step, *had]), commit=False)


def _open_run() -> dict[str, Any]:
    """Name the run that is open here; nothing where none is."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or run.disabled:
        return {}
    folder = str(Path(run.dir).resolve().parent)
    named = {"id": run.id, "project": run.project, "entity": run.entity or None}
    return {**named, "folder": folder, "is_offline": run.offline}


def _log_nowhere() -> None:
    """Have the script's calls do nothing."""
    import_module("wandb").init(mode="disabled")
