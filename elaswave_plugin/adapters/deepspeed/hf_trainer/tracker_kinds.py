"""The trackers that transformers has callbacks for: how a run is named, opened again and read.

transformers.Trainer calls each callback on every worker; that of the main process logs. Source:
transformers/integrations/integration_utils.py, ``setup``, ``on_log`` and ``_initialized``.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_plugin.tracking.sinks import history_rows, points_of, whereabouts

Run = Mapping[str, Any]  # what names a run, as plain values
# Each line of a Trainer's log has it, so that it counts them.
EPOCH = "train/epoch"


class TrackerKind:
    """One tracker, by its callback; the defaults fit one that is told its run by the environment.

    A run is plain values, which other workers are given.
    """

    # The module that the callback holds, by the name of its attribute.
    module = ""

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run that is open here; nothing where none is."""
        raise NotImplementedError

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have the callback's own set-up open this run again.

        Return the arguments of the Trainer that it has to see changed.
        """
        raise NotImplementedError

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count the lines that the run has, by any worker; None where that cannot be known."""
        return None

    def opened(self, callback: Any, run: Run, lines: int) -> None:
        """Go on behind ``lines`` of this launch, in the run that is open now."""

    def whereabouts(self, run: Run) -> tuple[str, ...]:
        """Name the run at the end of the job; nothing by default."""
        return ()

    def close(self, callback: Any) -> None:
        """Write the rest, and close what is open here."""
        getattr(callback, self.module).finish()


class Wandb(TrackerKind):
    """W&B: offline, each main process leaves a folder of its own, all with one run id."""

    module = "_wandb"

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run, and the next place on its axis."""
        run = callback._wandb.run
        if run is None or run.disabled:
            return {}
        folder = Path(run.dir).resolve().parent
        return {"id": run.id, "project": run.project, "folder": str(folder), "step": run.step}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have W&B append to it, in the same folder where that is here."""
        root = Path(run["folder"]).parents[1]
        here = {"WANDB_DIR": str(root)} if root.is_dir() else {}
        told = {"WANDB_RUN_ID": run["id"], "WANDB_RESUME": "allow", "WANDB_PROJECT": run["project"]}
        os.environ.update(told | here)
        return {}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count those in W&B's own files; online, of what its server has."""
        if not Path(run["folder"]).is_dir():
            return None
        return sum(EPOCH in row for row in self._rows(callback, run))

    def opened(self, callback: Any, run: Run, lines: int) -> None:
        """Go on behind the places of the earlier rows, as W&B drops those that are not."""
        had = [row["_step"] + 1 for row in self._rows(callback, run)]
        own = callback._wandb.run
        own.log({}, step=max([run["step"] + lines, own.starting_step, *had]), commit=False)

    def whereabouts(self, run: Run) -> tuple[str, ...]:
        """Name the run, its folders, and the command that uploads them."""
        return whereabouts(Path(run["folder"]).parents[1], run["id"])

    def _rows(self, callback: Any, run: Run) -> list[dict[str, Any]]:
        rows, own = history_rows(Path(run["folder"]).parents[1], run["id"]), callback._wandb.run
        return rows if own.offline else [row for row in rows if row["_step"] < own.starting_step]


class TensorBoard(TrackerKind):
    """TensorBoard: each main process adds an event file to one folder."""

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the folder."""
        return {} if callback.tb_writer is None else {"folder": callback.tb_writer.get_logdir()}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have it write there."""
        callback.logging_dir = run["folder"]
        return {}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count them in the event files."""
        if not Path(run["folder"]).is_dir():
            return None
        return sum(name == EPOCH for name, _ in points_of(Path(run["folder"])))

    def close(self, callback: Any) -> None:
        """Close the event file."""
        callback.tb_writer.close()
        callback.tb_writer = None


class MLflow(TrackerKind):
    """MLflow: its store has every run."""

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run and its store."""
        run, store = callback._ml_flow.active_run(), callback._ml_flow.get_tracking_uri()
        return {} if run is None else {"id": run.info.run_id, "store": store}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have it open the run."""
        callback._ml_flow.set_tracking_uri(run["store"])
        os.environ["MLFLOW_RUN_ID"] = run["id"]
        return {}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Ask the store."""
        client = callback._ml_flow.MlflowClient(run["store"])
        return len(client.get_metric_history(run["id"], "epoch"))

    def close(self, callback: Any) -> None:
        """End the run, which may be opened again."""
        callback._ml_flow.end_run()


class Trackio(TrackerKind):
    """trackio: its store has every run, by project and name."""

    module = "_trackio"

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run, whose name trackio may have made."""
        run = callback._trackio.context_vars.current_run.get()
        return {} if run is None else {"project": run.project, "run_name": run.name}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have it open the run of this name."""
        return {"project": run["project"], "run_name": run["run_name"]}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count them in the local store; one on the Hub is not asked."""
        if callback._space_id is not None:
            return None
        rows = callback._trackio.SQLiteStorage.get_logs(run["project"], run["run_name"])
        return sum(EPOCH in row for row in rows)


class SwanLab(TrackerKind):
    """SwanLab: offline, each main process leaves a folder of its own, all with one run id."""

    module = "_swanlab"

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run."""
        return {"id": callback._swanlab.get_run().id}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have it open the run."""
        os.environ.update({"SWANLAB_RUN_ID": run["id"], "SWANLAB_RESUME": "allow"})
        return {}


class ClearML(TrackerKind):
    """ClearML: a task is continued; its callback takes the one that is open."""

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the task, and its folder where it is offline."""
        task = callback._clearml_task
        if task is None:
            return {}
        folder = str(task.get_offline_mode_folder() or "")
        name, project = task.name, task.get_project_name() or ""
        return {"id": task.id, "name": name, "project": project, "folder": folder}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Open the task, whose iterations go on to be those of the Trainer."""
        callback._clearml.Task.init(
            project_name=run["project"],
            task_name=run["name"],
            reuse_last_task_id=run["id"],
            continue_last_task=0,
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
        )
        callback._clearml_task = None
        # A callback that is not set up, as beside the main process, counts each line as a run.
        names: dict[str, Any] = {one.__name__: one for one in type(callback).__mro__}
        base = names["ClearMLCallback"]
        base._train_run_counter = base._model_connect_counter = 0
        return {}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count those in the folder; a server is not asked."""
        file = Path(run["folder"], "metrics.jsonl")
        if not run["folder"] or not Path(run["folder"]).is_dir():
            return None
        parts = file.read_text().splitlines() if file.exists() else []
        return sum(point["variant"] == "epoch" for part in parts for point in json.loads(part))

    def close(self, callback: Any) -> None:
        """Close the task, which may be continued."""
        callback._clearml_task.close()
        callback._clearml_task = None


class Aim(TrackerKind):
    """Aim: a point that is written again takes the place of the first one."""

    def run_of(self, callback: Any) -> dict[str, Any]:
        """Name the run."""
        return {} if callback._run is None else {"hash": callback._run.hash}

    def take_up(self, callback: Any, run: Run) -> Run:
        """Have it open the run."""
        callback.close()
        callback._run_hash = run["hash"]
        return {}

    def lines(self, callback: Any, run: Run) -> int | None:
        """Count none: all lines are written again."""
        return 0

    def close(self, callback: Any) -> None:
        """Close the run."""
        callback.close()


_KINDS = (
    ("WandbCallback", Wandb),
    ("TensorBoardCallback", TensorBoard),
    ("MLflowCallback", MLflow),
    ("TrackioCallback", Trackio),
    ("SwanLabCallback", SwanLab),
    ("ClearMLCallback", ClearML),
    ("AimCallback", Aim),
)


def kind_of(callback: Any) -> TrackerKind | None:
    """Return the tracker of a callback, also of a subclass; None for another callback."""
    names = {one.__name__ for one in type(callback).__mro__}
    return next((kind() for name, kind in _KINDS if name in names), None)
