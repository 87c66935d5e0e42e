"""torch.distributed.Work objects over works of a native backend; the doorbell leaves every wait."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from elaswave_plugin.errors import LinkError

if TYPE_CHECKING:
    from elaswave_plugin.communicator.device.communicator import Communicator
    from elaswave_plugin.communicator.device.engine import DeviceEngine

_SHORTEST_POLL_S = 20e-6
_LONGEST_POLL_S = 1e-3


class DeviceWork(Work):
    """A work of one communicator.

    wait() orders the current stream behind it, as NCCL's does, and blocks the host only where a
    limit is given or the backend knows no streams.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        communicator: Communicator,
        inner: Any,
        what: str,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._communicator = communicator
        self._inner = inner
        self._what = what
        self._timeout_s = timeout_s

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises EpochChanged when interrupted, LinkError after a limit."""
        limit_s = timeout.total_seconds()
        self._engine.check(self._communicator)
        if limit_s > 0 or self._communicator.inner.waits_on_host:
            self._poll(limit_s if limit_s > 0 else self._timeout_s)
        self._engine.guard(self._communicator, self._inner.wait)
        return True

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def _poll(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        pause_s = _SHORTEST_POLL_S
        while not self._inner.is_completed():
            if time.monotonic() > deadline_s:
                raise LinkError(f"{self._what}: timed out after {limit_s:g} s")
            self._engine.bell.wait(pause_s)
            self._engine.check(self._communicator)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def is_completed(self) -> bool:
        """True when done, failed or aborted."""
        return self._communicator.aborted or bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """True when done without an error."""
        return not self._communicator.aborted and bool(self._inner.is_success())

    def exception(self) -> Any:
        """The interruption or the backend's error, or None."""
        return self._engine.interruption(self._communicator) or self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return list(self._inner.result())

    def source_rank(self) -> int:
        """The group rank from which a receive got its data."""
        return int(self._inner._source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """The backend's future of the result."""
        return self._inner.get_future()
