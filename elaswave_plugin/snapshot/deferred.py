"""Reads the optimizer state that follows its weights, while the redone step computes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

import torch

from elaswave_plugin.core.layout.shards import MOMENTS
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.errors import EpochChanged, LinkError
from elaswave_plugin.snapshot.restore import Access, read_parts

_CHECK_EVERY_S = 0.02


class Followed(NamedTuple):
    """The seconds until the moments arrived, the seconds of waiting for them, the bytes fetched."""

    seconds: float = 0.0
    late_s: float = 0.0
    fetched_bytes: int = 0


class DeferredMoments:
    """The moments of one worker's new shard, on their way in a thread."""

    def __init__(
        self,
        plan: RecoveryPlan,
        access: Access,
        *,
        write: Callable[[torch.Tensor], None],
    ) -> None:
        """``write`` installs them, shape [2, shard_numel]."""
        self._check = access.check
        self._write = write
        self._timeout_s = access.timeout_s
        self._dropped = threading.Event()
        started_s = time.monotonic()

        def still_wanted() -> None:
            if self._dropped.is_set():
                raise EpochChanged(plan.epoch, "what was on its way is wanted no more")
            access.check()

        def read() -> tuple[torch.Tensor, int, float]:
            moments, fetched_bytes = read_parts(plan, MOMENTS, replace(access, check=still_wanted))
            return moments, fetched_bytes, time.monotonic() - started_s

        thread = ThreadPoolExecutor(1, thread_name_prefix="elaswave-state")
        self._arrival = thread.submit(read)
        thread.shutdown(wait=False)

    @property
    def is_on_its_way(self) -> bool:
        """True if some of them are still to come."""
        return not self._arrival.done()

    def complete(self) -> Followed:
        """Wait for the moments and install them; raises SnapshotUnreadableError, EpochChanged."""
        asked_s = time.monotonic()
        while not self._arrival.done():
            self._check()
            wait([self._arrival], timeout=_CHECK_EVERY_S)
        moments, fetched_bytes, seconds = self._arrival.result()
        late_s = time.monotonic() - asked_s
        self._write(moments)
        return Followed(seconds=seconds, late_s=late_s, fetched_bytes=fetched_bytes)

    def drop(self) -> None:
        """They are wanted no more; returns when nothing is read any longer.

        What reads asks before every few megabytes whether it is still wanted. Raises LinkError
        where it goes on reading all the same.
        """
        self._dropped.set()
        if not wait([self._arrival], timeout=self._timeout_s).done:
            raise LinkError(
                f"the optimizer state of an earlier view is still being read {self._timeout_s:g} s"
                " after it was given up"
            )
