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

    def __init__(
        self,
        worker: Worker,
        record: CallRecord,
        *,
        place: tuple[int, ...],
        source: tuple[int, ...] = (),
    ) -> None:
        """``place``: the part of the model that its script builds.

        Results differ between these, as those of collectives among them do. ``source``: what its
        script reads, and reports are of.
        """
        self._worker, self._record = worker, record
        self._place, self._source = place, source
        self.why_alike: str | None = None
        """Why no worker with another source can be told, if so."""
        worker.notes.add(_NOTED, lambda step: record.told())

    def tell(self) -> Any:
        """Return which record this worker has."""
        return [self._place, self._source, self.why_alike]

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Tell each newcomer what the calls returned to one of its source, its place, or any other.

        Raises ConfigurationError on one that cannot be told.
        """
        asks, me = told[dist.get_rank()] is None, (self._place, self._source)
        asked = sorted({one for one, is_asking in gathered([me, asks]) if is_asking})
        knowing = [rank for rank, one in enumerate(told) if one is not None]
        for place, source in asked:
            nearest = max(knowing, key=lambda one: (told[one][1] == source, told[one][0] == place))
            mine = self._record.told() if nearest == dist.get_rank() else None
            is_noted = nearest == dist.get_world_size()
            record = self._worker.notes.read(_NOTED) if is_noted else told_by(nearest, mine, _NOTED)
            if asks and me == (place, source):
                _, theirs, why_alike = told[nearest]
                self._learn(record if theirs == source else why_alike or record)

    def _learn(self, record: Any) -> None:
        if isinstance(record, str):
            raise ConfigurationError(f"a worker that comes later cannot be told: {record}")
        self._record.learn(record)
