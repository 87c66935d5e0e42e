"""Has a later worker told what the calls of the others' loops have returned."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.call_record import CallRecord
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered, told_by

_NOTED = "what the calls of the script's loop returned"


def check_loaded(worker: Worker, mine: Sequence[str]) -> None:
    """Raise ConfigurationError in a later worker whose script went on from another checkpoint.

    ``mine``: the checkpoints that it has loaded before its loop. Called there, before the worker
    asks the others to let it in, who would make a step again without it.
    """
    if not worker.detached:
        worker.remember(loaded=list(mine))
    theirs = worker.job_constants.get("loaded", mine)
    if list(mine) != list(theirs):
        raise ConfigurationError(
            f"this worker came later, and its script has loaded {list(mine)} at its start, and"
            f" those of the others {list(theirs)}: its loop would count from another step; set"
            " respawn to 0 where a script goes on from the newest checkpoint"
        )


class RecordTold:
    """The record of one worker, told to those of its place who come later: a `Knowledge`."""

    def __init__(self, worker: Worker, record: CallRecord, *, place: tuple[int, ...]) -> None:
        """``place``: the part of the model that its script builds.

        Results differ between these, as those of collectives among them do.
        """
        self._worker, self._record, self._place = worker, record, list(place)
        worker.notes.add(_NOTED, lambda step: record.told())

    def tell(self) -> Any:
        """Return which record this worker has."""
        return self._place

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Tell each newcomer what the calls returned to a worker of its place, or to any other.

        Raises ConfigurationError on one that cannot be told.
        """
        asks = told[dist.get_rank()] is None
        asked = sorted({place for place, one in _told([self._place, asks]) if one})
        knowing = [rank for rank, one in enumerate(told) if one is not None]
        for place in asked:
            source = next((one for one in knowing if list(told[one]) == list(place)), knowing[0])
            mine = self._record.told() if source == dist.get_rank() else None
            is_noted = source == dist.get_world_size()
            record = self._worker.notes.read(_NOTED) if is_noted else told_by(source, mine, _NOTED)
            if asks and list(place) == self._place:
                self._learn(record)

    def _learn(self, record: Any) -> None:
        if isinstance(record, str):
            raise ConfigurationError(f"a worker that comes later cannot be told: {record}")
        self._record.learn(record)


def _told(mine: Any) -> list[tuple[tuple[int, ...], bool]]:
    return [(tuple(place), asks) for place, asks in gathered(mine)]
