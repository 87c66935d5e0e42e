"""DeepSpeed's monitor: an event is written once no recovery can take it back, also by a new rank 0.

An event belongs to the step that wrote it. Every worker keeps its events until that step is sealed
everywhere; then the owner of rank 0 writes them and the others forget theirs. The next owner opens
the same files, and the same W&B run, and goes on with what it still keeps. Where rank 0 moves away
from a living owner, to one that comes back, the next one waits until that has closed them.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from deepspeed.monitor.monitor import MonitorMaster

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.user import UserLoop

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Event = tuple[Any, ...]  # name, value, place on the axis

# A killed owner loses the rows of the last interval, so it is short; W&B's own default is 15 s.
_FLUSH_INTERVAL_S = "0.2"
# A service that does not answer, or a file system, must not keep the others from their end.
_LIMIT_S = 60.0


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


class Holders(NamedTuple):
    """The holders of monitors: the owner of rank 0 can write; some worker has monitors open."""

    somebody_writes: bool
    somebody_holds: bool


class ElasticMonitor:
    """Takes the place of ``engine.monitor``."""

    def __init__(self, engine: Any, loop: UserLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._config = engine._config.monitor_config
        self.enabled = bool(engine.monitor.enabled)
        # Whether rank 0 is here, or was before the last recovery.
        self.was_first = dist.get_rank() == 0 and not loop.worker.detached
        self._master = engine.monitor if self.was_first else None
        self._opening: Future[MonitorMaster] | None = None
        self._closing: Future[None] | None = None
        # With the number of steps that are complete once the event counts.
        self.events: list[tuple[int, Event]] = []
        self._final: list[Event] = []
        self._restarts = False

    def write_events(self, event_list: Sequence[Event]) -> None:
        """As DeepSpeed's, on any worker; what an interrupted iteration writes does not count."""
        if not self.enabled or (self._loop.dead and not self._restarts):
            return
        step = self._loop.worker.completed + (self._loop.iteration > 0)
        self.events += [(step, event) for event in event_list]

    def add_step(self) -> None:
        """Note what DeepSpeed's step writes on rank 0 only; any worker may have to write it."""
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
        """True if this worker owns rank 0 and has the monitors open."""
        if self._opening is not None and self._opening.done():
            self._master, self._opening = self._opening.result(), None
        return self.enabled and self._master is not None

    @property
    def holds(self) -> bool:
        """True if monitors are open here, or are being opened or closed."""
        closes = self._closing is not None and not self._closing.done()
        return self.enabled and (closes or bool(self._master or self._opening))

    def release(self, *, holders: Holders) -> None:
        """Write what is final; a collective has shown that all completed steps are sealed.

        It has shown ``holders`` too: without an owner that can write, all keep everything.
        """
        self._open_where_free(holders.somebody_holds)
        if not holders.somebody_writes:
            return
        completed, kept = self._loop.worker.completed, self.events
        self.events = [(step, event) for step, event in kept if step > completed]
        if self.writes:
            self._final += [event for step, event in kept if step <= completed]
        # Nobody else will write them when rank 0 begins to: at worst a point is lost, none doubled.
        dist.barrier()
        self._write()

    def restarting(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Work that starts again after a loss: every start takes back what the former one wrote."""
        kept = [*self.events]

        def attempt() -> Result:
            self.events, self._restarts = [*kept], True
            try:
                return work()
            finally:
                self._restarts = False

        return attempt

    def tell(self) -> list[tuple[int, Event]]:
        """Return the events that a later worker keeps, or writes in the place of this one."""
        return [*((0, event) for event in self._final), *self.events]

    def recovered(self, *, somebody_holds: bool) -> None:
        """Forget what is redone; the monitors go to where rank 0 is now, beside the training."""
        completed = self._loop.worker.completed
        self.events = [(step, event) for step, event in self.events if step <= completed]
        self.was_first = dist.get_rank() == 0
        if not self.was_first and (self._master or self._opening):
            self._closing = _beside(_close, self._master, self._opening)
            self._master, self._opening, self._final = None, None, []
        self._open_where_free(somebody_holds)

    def _open_where_free(self, somebody_holds: bool) -> None:
        if self.enabled and dist.get_rank() == 0 and not somebody_holds:
            self._opening = _beside(_open_again, self._config)

    def await_closed(self) -> None:
        """Wait until they are closed, before the end: the next rank 0 may have to open them."""
        if self._closing is not None and not _ended(self._closing):
            log.warning("DeepSpeed's monitors are still not closed after %g s", _LIMIT_S)

    def close(self) -> None:
        """Write the rest: every step is complete. Where they do not open, it is said and lost."""
        self._open_where_free(self.holds or dist.get_rank() != 0)
        if self._opening is not None and not _ended(self._opening):
            lost = len(self._final) + len(self.events)
            text = "DeepSpeed's monitors are not open after %g s: the last %d events are lost"
            log.warning(text, _LIMIT_S, lost)
        if self.writes:
            self._final += [event for _, event in self.events]
            self.events = []
            self._write()

    def _write(self) -> None:
        if self._master is not None and self._final:
            _write_all(self._master, self._final)
            self._final = []


def _beside(work: Callable[..., Result], *arguments: Any) -> "Future[Result]":
    """Run it in a thread of its own."""
    runner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elaswave-monitor")
    future = runner.submit(work, *arguments)
    runner.shutdown(wait=False)
    return future


def _ended(work: "Future[Any]") -> bool:
    """Return whether it ends within the limit; raises what it raised."""
    if not wait([work], timeout=_LIMIT_S).done:
        return False
    work.result()
    return True


def _close(master: MonitorMaster | None, opening: "Future[MonitorMaster] | None") -> None:
    if opening is not None:
        if not _ended(opening):
            log.warning("DeepSpeed's monitors are still not open after %g s: left", _LIMIT_S)
            return
        master = opening.result()
    assert master is not None
    if master.tb_monitor is not None:
        master.tb_monitor.summary_writer.close()
    if master.wandb_monitor is not None:
        import_module("wandb").finish()


def _write_all(master: MonitorMaster, events: list[Event]) -> None:
    master.write_events(events)
    if master.wandb_monitor is not None:
        # W&B holds the row of the newest step back.
        master.wandb_monitor.log({}, commit=True)


def _open_again(config: Any) -> MonitorMaster:
    master = MonitorMaster(config)
    if master.csv_monitor is not None:
        # It writes a header into every file that it has not written to.
        files = Path(master.csv_monitor.log_dir).glob("*.csv")
        master.csv_monitor.filenames = [file.stem for file in files]
    return master
