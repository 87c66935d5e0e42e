"""Has workers that a loss has met in earlier calls pass over those that others have behind them."""

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.loops.call_record import CallRecord, Entry, block_of, calls_of
from elaswave_plugin.values.plain import gathered, told_by


class SharedRecord(CallRecord):
    """A record of calls that all workers make, with some of their own in between."""

    _keeps_on = True

    def __init__(self, *, own: Collection[str], when_level: Callable[[], object]) -> None:
        """``own``: calls that some workers' scripts make, and others not.

        ``when_level()``: the script has come to the call that the others make next.
        """
        super().__init__(own=own, when_level=when_level)
        # Calls of all that were made, and those that are to be passed over.
        self._known = 0
        self._came_later = False

    def catch_up(self, standing: Any) -> Any:
        """Have all pass over what any has behind it (collective over WORLD, after a recovery).

        ``standing``: beside the calls, where this worker stands; returns that of the one which is
        ahead, or None where this one is not behind it. Raises ConfigurationError where so much is
        missing that it is not kept.
        """
        known = gathered(self._known)
        fewest, most, mine = min(known), max(known), self._known
        if fewest == most:
            return None
        source = known.index(most)
        told = (self._since(fewest), standing) if source == dist.get_rank() else None
        block, there = told_by(source, told)
        if mine == most:
            return None
        self._coming.extend(self._missing(calls_of(block), mine - fewest))
        self._known = most
        return there

    def learn(self, told: list[bytes]) -> None:
        """Have all of these calls passed over."""
        super().learn(told)
        self._came_later = True
        self._known = sum(self._is_met(one) for block in told for one in calls_of(block))

    def note(self, call: str, returned: Any) -> None:
        """Note what a call has returned to the script."""
        super().note(call, returned)
        self._known += call not in self._own

    def _differs(self, mine: str, theirs: str) -> str:
        if self._came_later:
            return super()._differs(mine, theirs)
        return (
            f"the script of this worker calls {mine} where that of another one had called {theirs}"
            " when a loss met them: all workers' scripts have to make the same calls"
        )

    def _is_met(self, entry: Entry) -> bool:
        return entry[0] not in self._own

    def _since(self, known: int) -> bytes:
        """Pack what comes behind the first ``known`` calls of all."""
        last = [*self._newest, *self._coming]
        last += [one for block in self._blocks_coming for one in calls_of(block)]
        blocks, missing = [*self._blocks], self._known - known
        while sum(map(self._is_met, last)) <= missing and blocks:
            last = [*calls_of(blocks.pop()), *last]
        places = [place for place, one in enumerate(last) if self._is_met(one)]
        if len(places) < missing:
            raise ConfigurationError(
                f"a loss has met workers that are {missing} calls behind others, which keep"
                f" {len(places)}: {self._flaw}"
            )
        first = places[-missing - 1] + 1 if len(places) > missing else 0
        return block_of(_plain(one) for one in last[first:])

    def _missing(self, calls: list[Entry], met: int) -> list[Entry]:
        """Return those that this worker has not made, which has made ``met`` calls of all of them.

        What it has called by itself behind them it has made as well, if the other one has too.
        """
        places = [place for place, one in enumerate(calls) if self._is_met(one)]
        calls = calls[places[met - 1] + 1 if met else 0 :]
        tail: list[str] = []
        for entry in reversed(self._newest):
            if self._is_met(entry):
                break
            tail.insert(0, entry[0])
        has_made_alike = [one[0] for one in calls[: len(tail)]] == tail
        return calls[len(tail) :] if has_made_alike else calls


def _plain(call: Entry) -> Entry:
    """The call, without what it returned where that is not plain."""
    try:
        block_of([call])
    except ConfigurationError:
        return *call[:2], []
    return call
