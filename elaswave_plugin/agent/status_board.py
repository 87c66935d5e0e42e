"""The status that an agent can tell of one of its workers (standard library only)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from elaswave_plugin.agent.trainer_session import TrainerSession
from elaswave_plugin.core.agreement.effects import Ring
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.ipc.wire import Frame

RECENT_VIEWS = 20


class StatusBoard:
    """Notes what a worker is asked and told; used by the control thread only.

    Moments are seconds since 1970, since people of several machines compare them.
    """

    def __init__(self) -> None:
        self._proposal: dict[str, Any] | None = None
        self._views: deque[dict[str, Any]] = deque(maxlen=RECENT_VIEWS)

    def proposed(self, ring: Ring, now_s: float) -> None:
        """A proposal is open, or has become urgent; before that it may wait for a step's end."""
        self._proposal = {
            "epoch": ring.ballot.epoch,
            "reason": ring.reason,
            "since_s": now_s,
            "late": ring.is_urgent,
        }

    def answered(self) -> None:
        """The open proposal was answered."""
        if self._proposal is not None:
            self._proposal["late"] = False

    def committed(self, path: Sequence[MembershipView], now_s: float) -> None:
        """The trainer is told these views, the last of which holds from now on."""
        self._proposal = None
        self._views += [describe_change(view, now_s) for view in path]

    @property
    def is_changing(self) -> bool:
        """True if a proposal of another view is open here."""
        return self._proposal is not None

    def report(self, trainer: TrainerSession, progress: Sample | None, *, now_s: float) -> Frame:
        """The answer of an agent about this worker, for `elaswave_plugin.cli.status`."""
        life, proposal = trainer.life, self._proposal
        return {
            "slot": trainer.slot,
            "trainer_pid": trainer.pid if life.lives else 0,
            "incarnation": life.incarnation,
            "phase": life.phase,
            "progress": progress and to_json(progress),
            "views": list(self._views),
            "proposal": proposal and {**proposal, "open_s": now_s - proposal["since_s"]},
            "layout": trainer.layout,
            "slow": trainer.slow,
            "late_in": None if life.has_come else trainer.late_in,
            "exited": life.end and life.end[0],
        }


def describe_change(view: MembershipView, now_s: float) -> dict[str, Any]:
    return {
        "time_s": now_s,
        "epoch": view.epoch,
        "workers": len(view.ranks),
        "reason": view.reason,
    }
