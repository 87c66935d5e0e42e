"""Evaluations that a script makes before it trains, kept for a worker that comes later.

With tensor parallelism its script makes them without the others of its replica, and they return
what these were told.
"""

import base64
from collections.abc import Callable
from typing import Any

from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import decode, encode, gathered, is_plain

_WHAT = "what evaluations before the training returned"
# Bytes of all that is kept: each agent of the job has them.
_LARGEST = 1 << 18


class EvaluationsBefore:
    """One worker's evaluations until it trains."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._returned: list[bytes] = []
        self._is_whole = True

    def of(self, source: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Make an evaluation; returns what it gave to the workers of ``source`` at the launch."""
        returned = make()
        if not self._worker.detached:
            self._is_whole = self._is_whole and is_plain(returned)
            self._returned.append(encode(returned) if self._is_whole else b"")
            return returned
        known = self._kept().get(source, [])[len(self._returned) :]
        self._returned.append(b"")
        return decode(known[0], _WHAT) if known else returned

    def _kept(self) -> dict[tuple[int, ...], list[bytes]]:
        text = self._worker.job_constants.get("evaluated", "")
        kept: dict[tuple[int, ...], list[bytes]] = decode(base64.b64decode(text)) if text else {}
        return kept

    def end(self, source: tuple[int, ...]) -> bool:
        """The script trains from now on; returns whether a later worker is told of all of them.

        Collective over WORLD where there were any, except on a worker that comes later.
        """
        if self._worker.detached or not self._returned:
            return True
        told = gathered((source, self._is_whole, self._returned))
        kept = encode({source: returned for source, _, returned in told})
        if len(kept) > _LARGEST or not all(is_whole for _, is_whole, _ in told):
            return False
        self._worker.remember(evaluated=base64.b64encode(kept).decode())
        return True
