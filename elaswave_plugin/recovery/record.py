"""The cost of a recovery, as the event that it becomes once work was completed after it."""

import os
import time
from collections.abc import Mapping
from typing import Any

from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.phases import Phases
from elaswave_plugin.snapshot.restore import Followed
from elaswave_plugin.tracking.events import EventLog


class RecoveryRecord:
    """One worker's clock of its recoveries."""

    def __init__(self, *, slot: int, events: EventLog, phases: Phases) -> None:
        self._slot, self._events, self._phases = slot, events, phases
        # By the wall clock, for outside readers, and by one that nobody sets, for durations.
        self._rung_at_s = 0.0
        self._started_s = 0.0
        self._replay_started_s = 0.0
        # Since the last event: when the step began that was interrupted, by the wall clock, and
        # for how long it was worked on.
        self._begun_at_s: float | None = None
        self._worked_s = 0.0
        self.kept_s = 0.0
        """The seconds of that work which the redo has not to do again."""
        # What is known when work begins again; None once the event is written.
        self._fields: dict[str, object] | None = None
        # None for a newcomer, which has worked under none.
        self._left_flow: Flow | None = None
        self._plan: RecoveryPlan | None = None
        self._change: dict[str, object] = {}
        self._fetched_bytes = 0
        self._ranks_before: tuple[int, ...] = ()
        self.followed = Followed()

    def begin(self, *, ranks: tuple[int, ...]) -> None:
        """A step is interrupted; ``ranks``: the slots as they are ranked as yet."""
        # A recovery that was itself interrupted has told nobody.
        if self._fields is None:
            self._ranks_before = ranks
        self._rung_at_s, self._started_s = time.time(), time.monotonic()
        began_s = self._phases.began_s
        worked_s = 0.0 if began_s is None else self._started_s - began_s
        self._phases.began_s, self.kept_s = None, 0.0
        if self._begun_at_s is None:
            self._begun_at_s = self._rung_at_s - worked_s
        self._worked_s += worked_s
        self._phases.seconds = {}
        self.followed = Followed()

    def end(
        self,
        plan: RecoveryPlan,
        *,
        left: Flow | None,
        interrupted_step: int,
        newcomers: tuple[str, ...],
        fetched_bytes: int,
    ) -> float:
        """Work begins again under ``plan``, after ``left``; returns the seconds without any.

        ``left``: None for a newcomer, which cannot tell how the others worked before.
        """
        # A recovery that was itself interrupted has not been worked under.
        if self._fields is None:
            self._left_flow = left
        self._plan = plan
        self._change = _layout_change(self._left_flow, plan.dataflow)
        self._fetched_bytes = fetched_bytes
        self._replay_started_s = time.monotonic()
        pause_s = self._replay_started_s - self._started_s
        self._fields = {
            "epoch": plan.epoch,
            "restored_step": plan.restore_step,
            "interrupted_step": interrupted_step,
            "rung_at_s": self._rung_at_s,
            "newcomers": newcomers,
            "pause_s": pause_s,
            "in_place": plan.in_place(self._slot),
        }
        return pause_s

    def over(self) -> dict[str, object] | None:
        """Work was completed: write the event of the recovery that led to it, if one did."""
        if self._fields is None or self._plan is None:
            return None
        now_s = time.monotonic()
        fields: dict[str, Any] = {
            **self._fields,
            "mttr_s": now_s - self._started_s,
            "phases_s": {**self._phases.seconds, "replay": now_s - self._replay_started_s},
            "bytes_moved": self._plan.bytes_moved(),
            "fetched_bytes": self._fetched_bytes + self.followed.fetched_bytes,
            "followed_s": self.followed.seconds,
            "followed_late_s": self.followed.late_s,
            "begun_at_s": self._begun_at_s,
            "kept_s": self.kept_s,
            "thrown_s": max(0.0, self._worked_s - self.kept_s),
        }
        self._fields = self._begun_at_s = None
        self._worked_s = 0.0
        speaker, line = _line(self._plan, fields, before=self._ranks_before)
        if speaker == self._slot:
            say(f"{line}{self._heir(self._plan.ranks[0])}")
        self._events.emit(
            "recovered",
            slot=self._slot,
            reason=self._plan.reason,
            plan=str(self._plan),
            **fields,
            **self._change,
        )
        return fields

    def _heir(self, rank_0: int) -> str:
        """Say that rank 0 is another worker: a script that prints there alone has to know."""
        return (
            "" if rank_0 in self._ranks_before[:1] else f"; worker {rank_0} is rank 0 from now on"
        )


def recovered_text(restored_step: int, bytes_moved: int, phases_s: Mapping[str, float]) -> str:
    """Return what a recovery did, and the milliseconds of each of its phases that was timed."""
    times = (f"{name} {phases_s[name] * 1e3:.1f}" for name in RECOVERY_PHASES if name in phases_s)
    moved = f"{bytes_moved / 2**10:.0f} KiB moved"
    return f"state of step {restored_step} restored, {moved}; ms: {'  '.join(times)}"


def _line(
    plan: RecoveryPlan, fields: Mapping[str, Any], *, before: tuple[int, ...]
) -> tuple[int, str]:
    """Choose the first worker that is no newcomer to announce the recovery's end, and its words.

    Where all are newcomers, it is the first of them, and the state of those that are gone goes on.
    ``before``: the members of the view that was left; with all of them still there, nothing was
    lost, and the work is only dealt in another way.
    """
    came = {int(name.partition(".")[0]) for name in fields["newcomers"]}
    stayed = [slot for slot in plan.ranks if slot not in came]
    speaker = (stayed or plan.ranks)[0]
    if came and stayed:
        who = " and ".join(f"worker {slot}" for slot in sorted(came))
        has = f"{who} work{'s' if len(came) == 1 else ''} again from step {plan.restore_step} on"
        return speaker, f"{has}; the others stood still for {fields['pause_s'] * 1e3:.1f} ms"
    text = recovered_text(plan.restore_step, fields["bytes_moved"], fields["phases_s"])
    return speaker, f"{'dealt again' if {*plan.ranks} == {*before} else 'recovered'}: {text}"


def _layout_change(before: Flow | None, after: Flow) -> dict[str, object]:
    """Return what an outside reader needs to judge a change of layout; nothing without stages."""
    if not isinstance(after, PipelineFlow):
        return {}
    known = {"layout_before": before.layout.to_json()} if isinstance(before, PipelineFlow) else {}
    return {
        **known,
        "layout_after": after.layout.to_json(),
        "dataflow": after.policy,
        "pieces": after.pieces,
        "windows": after.windows,
        "clocks": after.clocks,
        "slow": after.slow,
        "greedy_order": after.is_greedy,
        "split_backward": after.is_split,
        "plan_reasons": after.reasons,
        "layer_times_s": after.times.to_json() if after.times.is_measured else None,
        "predicted_compute_s": after.compute_s,
        "predicted_step_s": after.step_s,
        "processors": len(os.sched_getaffinity(0)),
    }
