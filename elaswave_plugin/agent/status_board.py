"""The status that an agent can tell of one of its workers (standard library only)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from elaswave_plugin.core.agreement.effects import Ring
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.ipc.frames import (
    Finish,
    FromTrainer,
    Join,
    Layout,
    Leave,
    Progress,
    Quiesced,
    Ready,
    SlowSeen,
)
from elaswave_plugin.ipc.wire import Frame

RECENT_VIEWS = 20


class StatusBoard:
    """Notes what happens to one worker; used by the control thread only.

    Moments are seconds since 1970, since people of several machines compare them.
    """

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._phase = "starting"
        self._trainer_pid = 0
        self._incarnation = 0
        self._exited: str | None = None
        self._proposal: dict[str, Any] | None = None
        self._layout: dict[str, Any] | None = None
        self._slow: tuple[tuple[int, str], ...] = ()
        self._late_in: str | None = None
        self._views: deque[dict[str, Any]] = deque(maxlen=RECENT_VIEWS)

    def started(self, pid: int, incarnation: int) -> None:
        """A trainer runs."""
        self._trainer_pid = pid
        self._incarnation = incarnation
        self._exited = None
        self._slow = ()
        self._late_in = None
        self._phase = "starting"

    def proposed(self, ring: Ring, now_s: float) -> None:
        """A proposal is open, or has become urgent; before that it may wait for a step's end."""
        urgent = not ring.boundary or ring.before_step is not None
        self._proposal = {
            "epoch": ring.ballot.epoch,
            "reason": ring.reason,
            "since_s": now_s,
            "late": urgent,
        }
        if self._phase == "training" and urgent:
            self._phase = "stopping"

    def answered(self) -> None:
        """The open proposal was answered."""
        if self._proposal is not None:
            self._proposal["late"] = False

    def committed(self, path: Sequence[MembershipView], now_s: float) -> None:
        """The trainer is told these views, the last of which holds from now on."""
        self._proposal = None
        self._phase = "training"
        self._views += [describe_change(view, now_s) for view in path]

    def heard(self, message: FromTrainer) -> None:
        """The trainer says something to its agent."""
        match message:
            case Join():
                self._phase = "building" if self._incarnation else "joined"
            case Ready():
                self._phase = "waiting to enter"
                self._late_in = None
            case Quiesced():
                self._phase = "quiesced"
            case Progress():
                self._phase = message.text
            case Layout():
                self._layout = message.layout
            case SlowSeen():
                self._slow = message.slow
            case Finish():
                self._phase = "finished"
            case Leave():
                self._phase = "leaving"

    def waits(self, line: str) -> None:
        """The trainer, which was started again, is late: it was seen in this line."""
        self._late_in = line

    @property
    def is_changing(self) -> bool:
        """True if a proposal of another view is open here."""
        return self._proposal is not None

    @property
    def layout(self) -> dict[str, Any] | None:
        """The places of all workers, as the trainer has told; None in a data-parallel job."""
        return self._layout

    def dismissed(self) -> None:
        """The trainer is told that it may leave."""
        self._phase = "leaving"

    def exited(self, evidence: str) -> None:
        """The trainer is gone."""
        self._trainer_pid = 0
        self._exited = evidence
        if self._phase not in ("finished", "leaving"):
            self._phase = "exited"

    def report(self, progress: Sample | None, *, now_s: float) -> Frame:
        """The answer of an agent about this worker, for `elaswave_plugin.cli.status`."""
        proposal = self._proposal
        return {
            "slot": self._slot,
            "trainer_pid": self._trainer_pid,
            "incarnation": self._incarnation,
            "phase": self._phase,
            "progress": progress and to_json(progress),
            "views": list(self._views),
            "proposal": proposal and {**proposal, "open_s": now_s - proposal["since_s"]},
            "layout": self._layout,
            "slow": self._slow,
            "late_in": self._late_in,
            "exited": self._exited,
        }


def describe_change(view: MembershipView, now_s: float) -> dict[str, Any]:
    return {
        "time_s": now_s,
        "epoch": view.epoch,
        "workers": len(view.ranks),
        "reason": view.reason,
    }
