"""The reasons for which an agent refuses a request about a worker (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence

from elaswave_plugin.agent.status_board import StatusBoard
from elaswave_plugin.agent.trainer_session import TrainerSession
from elaswave_plugin.core.layout.layout import why_impossible, why_needed


def why_it_stays(trainer: TrainerSession, ranks: Sequence[int], slot: int) -> str | None:
    """Say why the worker of ``slot`` may not leave a job of these ``ranks``; None where it may."""
    if not trainer.life.is_member:
        return "its trainer has no part in the training now"
    if len(ranks) == 1:
        return "it is the last one; end the job instead"
    needed = None if trainer.layout is None else why_needed(trainer.layout, {*ranks} - {slot})
    if needed is not None:
        return f"without it {needed}; end the job instead, or wait until others have joined"
    return None


def why_layers_stay(trainer: TrainerSession, board: StatusBoard, cuts: Sequence[int]) -> str | None:
    """Say why layers cannot move to these cuts between stages; None where they can."""
    layout = trainer.layout
    if layout is None or not trainer.life.is_member:
        return "its trainer has no stages, or no part in the training now"
    if board.is_changing:
        return "the members are changing just now; ask again when they have"
    return layout["why_layers_stay"] or why_impossible(layout, cuts)
