"""Names the slow workers of a job, and has their work dealt again where that pays."""

import time
from collections.abc import Iterable, Mapping, Sequence

from elaswave_plugin.core.agreement.view import WorkerId
from elaswave_plugin.core.layout.worker_facts import SlowReport, WorkerFacts
from elaswave_plugin.core.planner.layer_times import agreed
from elaswave_plugin.core.planner.payback import (
    PAUSE_S,
    Asked,
    Payback,
    gain_of_view,
    more_sums,
)
from elaswave_plugin.core.planner.slow import Slow, SlowWatch, reason_of_view
from elaswave_plugin.recovery.place import Place


class SlowWorkers:
    """One worker's comparison of all paces, alike on every worker."""

    def __init__(self, worker: Place) -> None:
        self._worker = worker
        self._watch = SlowWatch()
        self._payback, self._gain, self._more_s = Payback(), 0.0, 0.0
        # Those of the view in which another one was asked for.
        self._members: frozenset[WorkerId] = frozenset()
        # Whether the plan is to be made again, without news: what did not pay may do so later.
        self._asks_again = False
        self._compared_s: float | None = None  # when the paces of the step before were

    def reports(self) -> tuple[SlowReport, ...]:
        """List the slow workers, as the facts of a view carry them."""
        return self._watch.reports()

    @property
    def views(self) -> Asked | None:
        """The last view that was asked for slow workers."""
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
        if changed or self._asks_again:
            self._gain, self._more_s = self._gain_of_view()
            self._asks_again = False
        worse = self._payback.worse()
        if worse is not None:
            self._payback.take_back(step=worker.completed)
            worker.member.replan(f"less work for what is slow did not pay: {worse}")
        elif self._payback.pays(gain=self._gain, step=worker.completed, more_s=self._more_s):
            self._members = worker.view.workers
            self._payback.ask(step=worker.completed, is_judged=bool(self._watch.slow))
            worker.member.replan(reason_of_view(self._watch.slow))

    def _gain_of_view(self) -> tuple[float, float]:
        """The share of a step that dealing again would save, by what this worker has measured.

        And the seconds by which its sums take longer: in exact mode, one that is sent apart takes
        as long as that of a whole step.
        """
        worker, slow = self._worker, self._watch.slowness
        times = agreed({worker.slot: worker.stopwatch.times.medians()})
        placement = worker.placement.after(worker.view.ranks, times, slow)
        wanted = worker.deal(**placement.dealt_over)
        more = more_sums(worker.dataflow, wanted) if worker.promises_bits else 0
        gain = gain_of_view(worker.dataflow, wanted, slow=slow, times=times)
        return gain, more * worker.stopwatch.times.sum_s

    def learn(self, told: Sequence[SlowReport], asked: Asked | None) -> None:
        """Learn the slow workers as a view begins, and which was `asked_last`; alike on all."""
        before = self._watch.slow
        self._watch.restart(told)
        same_members = self._worker.view.workers == self._members
        self._payback.restart(asked, same_members=same_members)
        self._asks_again = asked is not None and asked.takes_back
        self._gain, self._more_s, self._compared_s = 0.0, 0.0, None
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


def asked_last(facts: Iterable[WorkerFacts]) -> Asked | None:
    """Return the last view that any of these workers has asked for, or was told of."""
    asked = (Asked(*one.slow_views) for one in facts if one.slow_views is not None)
    return max(asked, default=None)
