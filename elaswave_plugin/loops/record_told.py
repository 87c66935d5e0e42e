"""Has a later worker told what the calls of the others' loops have returned."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.call_record import CallRecord
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.gathered import gathered, told_by

_NOTED = "what the calls of the script's loop returned"


class RecordTold:
    """The record of one worker, told to those of its place who come later: a `Knowledge`."""

    def __init__(
        self, worker: Worker, record: CallRecord, *, place: tuple[int, ...], loads: Sequence[str]
    ) -> None:
        """``place``: the part of the model that its script builds; ``loads``: what it has loaded.

        Results differ between parts of the model, as those of collectives among them do.
        """
        self._worker, self._record = worker, record
        self._place, self._loads = list(place), loads
        worker.notes.add(_NOTED, lambda step: record.told())

    def tell(self) -> Any:
        """Return which record this worker has, and how its script began."""
        return self._place, list(self._loads)

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Tell each newcomer what the calls returned to a worker of its place, or to any other.

        Raises ConfigurationError on one whose script began otherwise.
        """
        asks = told[dist.get_rank()] is None
        asked = sorted({place for place, one in _told([self._place, asks]) if one})
        knowing = [rank for rank, one in enumerate(told) if one is not None]
        for place in asked:
            source = next((one for one in knowing if list(told[one][0]) == list(place)), knowing[0])
            mine = self._record.told() if source == dist.get_rank() else None
            is_noted = source == dist.get_world_size()
            record = self._worker.notes.read(_NOTED) if is_noted else told_by(source, mine, _NOTED)
            if asks and list(place) == self._place:
                self._learn(record, loads=told[source][1])

    def _learn(self, record: Any, *, loads: Sequence[str]) -> None:
        if list(self._loads) != list(loads):
            mine = list(self._loads)
            raise ConfigurationError(
                f"this worker came later, and its script has loaded {mine} at its start, and"
                f" those of the others {list(loads)}: its loop would count from another step; set"
                " respawn to 0 where a script goes on from the newest checkpoint"
            )
        if isinstance(record, str):
            raise ConfigurationError(f"a worker that comes later cannot be told: {record}")
        self._record.learn(record)


def _told(mine: Any) -> list[tuple[tuple[int, ...], bool]]:
    return [(tuple(place), asks) for place, asks in gathered(mine)]
