"""The records that every adapter writes of a job: completed steps, recoveries, snapshot costs."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from elaswave_plugin.framework import StepReport
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.state_dump import NamedPiece, dump_state
from elaswave_plugin.tracking.tracker import Tracker, step_metrics
from elaswave_plugin.trainer.signals import await_lease


def tracker_of(worker: Worker) -> Tracker:
    """A worker's tracker, which logs nothing while it may have been given up."""
    return Tracker(
        worker.config,
        worker.run_id,
        worker.owns_rank_0,
        before_row=partial(await_lease, worker.member.progress_page),
    )


class Recording:
    """The files and trackers of one worker."""

    def __init__(
        self, worker: Worker, tracker: Tracker, *, pieces: Callable[[], Iterable[NamedPiece]]
    ) -> None:
        """``pieces()`` are the worker's pieces of the present state, for a dump."""
        self._worker = worker
        self.tracker = tracker
        self._pieces = pieces
        # Whose the sinks were before; a worker that comes later does not know it.
        self._owner = None if worker.detached else worker.ranks[0]

    def attached(self, **sizes: int) -> None:
        """The job begins: say once what the snapshots cost and do not cover."""
        worker = self._worker
        if worker.owns_rank_0 and worker.config.snapshots:
            memory = worker.state.memory
            now, most = memory.in_use / 2**20, memory.at_most / 2**20
            one_node = len(worker.view.nodes) > len(set(worker.view.nodes)) == 1
            where = "; all copies are on one node: losing it ends the job" if one_node else ""
            # In one piece: print() writes the end of a line apart, and agents write as well.
            sys.stderr.write(
                f"elaswave: snapshots use {now:.1f} MiB of shared memory per worker, at most"
                f" {most:.1f} MiB of host memory through the loss of one{where}\n"
            )
        worker.events.emit(
            "attached",
            slot=worker.slot,
            pid=os.getpid(),
            settings=worker.config.model_dump(mode="json"),
            **sizes,
        )

    def patched(self, places: Sequence[str]) -> None:
        """Write what the patch records set, as ``PatchSet.places`` has it."""
        self._worker.events.emit("patched", slot=self._worker.slot, places=list(places))

    def recovered(self, recovery: dict[str, object]) -> None:
        """Tell the trackers; rank 0 may have moved here, or away."""
        worker, ranks = self._worker, self._worker.ranks
        is_heir = self._owner is not None and self._owner not in ranks
        self._owner = ranks[0]
        if worker.owns_rank_0:
            self.tracker.own(logged=worker.completed - 2, is_heir=is_heir)
        else:
            self.tracker.give_up()
        self.tracker.event("recovered", worker.completed, recovery)

    def step(
        self, step: int, report: StepReport, seconds: float, *, num_microbatches: int, last: bool
    ) -> dict[str, float]:
        """Write a completed step, and return its metrics.

        ``num_microbatches``: how many of them this worker ran. Raises EpochChanged, with nothing
        written, where this worker was stopped for so long that it was given up.
        """
        worker = self._worker
        record = {
            "slot": worker.slot,
            "pid": os.getpid(),
            "epoch": worker.view.epoch,
            "step": step,
            "loss": report.loss,
            "loss_hex": report.loss.hex(),
            "grad_norm": report.grad_norm,
            "grad_norm_hex": float(report.grad_norm).hex(),
            "step_s": seconds,
            "lr": report.lr,
            "tokens": report.tokens,
            "num_microbatches": num_microbatches,
        }
        # Sealing takes a while, and the signal that continues a stopped process may reach another
        # thread first. The time comes before the look: a process stopped between the look and the
        # line still tells when it had completed the step, which it then had the lease for.
        time_s = time.time()
        worker.member.await_lease()
        worker.steps.emit("step", time_s=time_s, **record)
        metrics = step_metrics(record, live_workers=len(worker.view.ranks))
        self.tracker.step(step, metrics)
        wanted = worker.config.dump_state
        if wanted == "every" or (wanted == "last" and last):
            self.dump(step)
        return metrics

    def dump(self, step: int) -> None:
        """Write this worker's pieces of the state after ``step``, where there is a directory."""
        worker = self._worker
        if worker.config.dir is not None:
            dump_state(
                worker.config.dir,
                slot=worker.slot,
                epoch=worker.view.epoch,
                step=step,
                pieces=self._pieces(),
            )
