"""Names the slow workers of a job, and has their work dealt again where that pays."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from elaswave_plugin.core.layout.worker_facts import SlowReport
from elaswave_plugin.core.planner.layer_times import agreed
from elaswave_plugin.core.planner.payback import PAUSE_S, Payback, gain_of_view
from elaswave_plugin.core.planner.slow import Slow, SlowWatch, reason_of_view

if TYPE_CHECKING:
    from elaswave_plugin.recovery.worker import Worker


class SlowWorkers:
    """One worker's comparison of all paces, alike on every worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._watch = SlowWatch()
        self._payback, self._gain = Payback(), 0.0
        self._compared_s: float | None = None  # when the paces of the step before were

    def reports(self) -> tuple[SlowReport, ...]:
        """List the slow workers, as the facts of a view carry them."""
        return self._watch.reports()

    @property
    def views(self) -> tuple[int, int] | None:
        """The number of views asked for slow workers, and the step before which the last was."""
        return self._payback.asked

    def compare(self, paces: Mapping[int, tuple[float, int]]) -> None:
        """Name the workers that are slow, and those that no longer are.

        ``paces``: by slot, with the tokens of that pass, 0 where they do not matter.
        Where it pays, a view of the same members deals the work again before one of the next steps.
        """
        if not paces:
            return
        now_s = time.monotonic()
        if self._compared_s is not None:
            self._payback.note(step_s=now_s - self._compared_s)
        self._compared_s = now_s
        before = dict(self._watch.slow)
        roles = [shard_group.ranks for shard_group in self._worker.placement.shard_groups]
        changed = self._watch.step(
            {slot: pace for slot, (pace, _) in paces.items()},
            roles,
            {slot: tokens for slot, (_, tokens) in paces.items()},
        )
        if changed:
            self._tell(before=before, slow=self._watch.slow)
        # One of them asks, and all plan alike.
        worker = self._worker
        if not worker.owns_rank_0 or worker.config.slow_workers != "act":
            return
        if changed:
            self._gain = self._gain_of_view()
        if self._payback.pays(gain=self._gain, step=worker.completed):
            self._payback.ask(step=worker.completed)
            worker.member.replan(reason_of_view(self._watch.slow))

    def _gain_of_view(self) -> float:
        """The share of a step that dealing again would save, by what this worker has measured."""
        worker, slow = self._worker, self._watch.slowness
        times = agreed({worker.slot: worker.stopwatch.times.medians()})
        placement = worker.placement.after(worker.view.ranks, times, slow)
        wanted = worker.deal(**placement.dealt_over)
        return gain_of_view(worker.dataflow, wanted, slow=slow, times=times)

    def learn(self, told: Sequence[SlowReport], views: Iterable[tuple[int, int] | None]) -> None:
        """Learn the slow workers as a view begins, and each worker's `views`; alike on all."""
        before = self._watch.slow
        self._watch.restart(told)
        self._payback.restart(max(filter(None, views), default=None))
        self._gain, self._compared_s = 0.0, None
        if before != self._watch.slow:
            self._tell(before=before, slow=self._watch.slow)

    def interrupt(self) -> None:
        """A step is not completed: what it took says nothing."""
        self._watch.interrupt()
        self._compared_s = None

    def note_pause(self, pause_s: float) -> None:
        """Note the cost of the last change of the view, as the estimate for another one."""
        self._payback.pause_s = max(PAUSE_S, pause_s)

    def _tell(self, *, before: Mapping[int, Slow], slow: Mapping[int, Slow]) -> None:
        worker = self._worker
        worker.member.tell_slow({slot: str(one) for slot, one in slow.items()})
        if worker.owns_rank_0:
            at = {"step": worker.completed, "epoch": worker.view.epoch}
            for slot, one in sorted(slow.items()):
                if one != before.get(slot):
                    evidence, ratio = str(one), one.ratio
                    worker.events.emit(
                        "slow_worker", slot=slot, ratio=ratio, evidence=evidence, **at
                    )
            for slot in before.keys() - slow.keys():
                worker.events.emit("slow_worker_over", slot=slot, **at)
