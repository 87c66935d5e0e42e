"""DeepSpeed's monitor: an event is written once no recovery can take it back, whoever is rank 0.

An event belongs to the step that wrote it. Every worker keeps its events until that step is sealed
everywhere; then the owner of rank 0 writes them and the others forget theirs. The next owner opens
the same files, and the same W&B run, and goes on with what it still keeps.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.monitor.monitor import MonitorMaster

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.runtime.user_loop import UserLoop

Result = TypeVar("Result")
Event = tuple[Any, ...]  # name, value, place on the axis

# A killed owner loses the rows of the last interval, so it is short; W&B's own default is 15 s.
_FLUSH_INTERVAL_S = "0.2"


def name_wandb_run(settings: ElasticConfig, config: Mapping[str, Any], run_id: str) -> None:
    """Have DeepSpeed's monitor open one W&B run over the whole job; before the engine is built.

    Raises ConfigurationError where the section asks for a run as well.
    """
    if not config.get("wandb", {}).get("enabled", False):
        return
    if settings.wandb != "off":
        raise ConfigurationError(
            f"wandb is enabled for DeepSpeed's monitor and {settings.wandb!r} in the section "
            'elaswave, and a process has one W&B run; set wandb to "off" in one of the two'
        )
    os.environ.setdefault("WANDB_RUN_ID", run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", _FLUSH_INTERVAL_S)


class ElasticMonitor:
    """Takes the place of ``engine.monitor``."""

    def __init__(self, engine: Any, loop: UserLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._config = engine._config.monitor_config
        self.enabled = bool(engine.monitor.enabled)
        self._master = engine.monitor if dist.get_rank() == 0 else None
        self._opening: Future[MonitorMaster] | None = None
        # With the number of steps that are complete once the event counts.
        self._kept: list[tuple[int, Event]] = []
        self._final: list[Event] = []
        self._restarts = False

    def write_events(self, event_list: Sequence[Event]) -> None:
        """As DeepSpeed's, on any worker; what an interrupted iteration writes does not count."""
        if not self.enabled or (self._loop.dead and not self._restarts):
            return
        step = self._loop.worker.completed + (self._loop.iteration > 0)
        self._kept += [(step, event) for event in event_list]

    def add_step(self) -> None:
        """What DeepSpeed's step writes on rank 0 only: the others may have to write it."""
        engine = self._engine
        if dist.get_rank() == 0:
            return
        events = [("Train/Samples/lr", engine.get_lr()[0], engine.global_samples)]
        scale = engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None
        if scale is not None:
            events.append(("Train/Samples/loss_scale", scale, engine.global_samples))
        self.write_events(events)

    @property
    def writes(self) -> bool:
        """Whether this worker owns rank 0 and has the monitors open."""
        if self._opening is not None and self._opening.done():
            self._master, self._opening = self._opening.result(), None
        return self.enabled and self._master is not None

    def release(self, *, somebody_writes: bool) -> None:
        """Write what is final; a collective has shown that all completed steps are sealed.

        It has shown ``somebody_writes`` too: without an owner that can, everyone keeps everything.
        """
        if not somebody_writes:
            return
        completed, kept = self._loop.worker.completed, self._kept
        self._kept = [(step, event) for step, event in kept if step > completed]
        if self.writes:
            self._final += [event for step, event in kept if step <= completed]
        # Nobody else will write them when rank 0 begins to: at worst a point is lost, none doubled.
        dist.barrier()
        self._write()

    def restarting(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Work that starts again after a loss: every start takes back what the former one wrote."""
        kept = [*self._kept]

        def attempt() -> Result:
            self._kept, self._restarts = [*kept], True
            try:
                return work()
            finally:
                self._restarts = False

        return attempt

    def recovered(self) -> None:
        """Forget what is redone; open the monitors where rank 0 is now, beside the training."""
        completed = self._loop.worker.completed
        self._kept = [(step, event) for step, event in self._kept if step <= completed]
        if self.enabled and dist.get_rank() == 0 and not (self._master or self._opening):
            opener = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elaswave-monitor")
            self._opening = opener.submit(_open_again, self._config)
            opener.shutdown(wait=False)

    def close(self) -> None:
        """Write the rest: every step is complete."""
        if self._opening is not None:
            self._opening.result()
        if self.writes:
            self._final += [event for _, event in self._kept]
            self._kept = []
            self._write()

    def _write(self) -> None:
        if self._master is None or not self._final:
            return
        self._master.write_events(self._final)
        if self._master.wandb_monitor is not None:
            # W&B holds the row of the newest step back.
            self._master.wandb_monitor.log({}, commit=True)
        self._final = []


def _open_again(config: Any) -> MonitorMaster:
    master = MonitorMaster(config)
    if master.csv_monitor is not None:
        # It writes a header into every file that it has not written to.
        files = Path(master.csv_monitor.log_dir).glob("*.csv")
        master.csv_monitor.filenames = [file.stem for file in files]
    return master
