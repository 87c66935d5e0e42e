"""torch.distributed.Work objects over our operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Operation
from elaswave_plugin.errors import ConfigurationError, EpochChanged


class ElasticWork(Work):
    """Some operations of which a caller may wait for all."""

    def __init__(self, links: LinkTable, operations: Sequence[Operation]) -> None:
        super().__init__()
        self._links = links
        self._operations = tuple(operations)
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. Raises EpochChanged when interrupted, LinkError after a timeout."""
        timeout_s = timeout.total_seconds()
        for operation in self._operations:
            try:
                self._links.wait(operation, timeout_s if timeout_s > 0 else None)
            except EpochChanged:
                if self._links.body is not None:
                    self._links.body.interrupted(operation.name)
                raise
        return True

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """True when done or failed."""
        return all(operation.done for operation in self._operations)

    def is_success(self) -> bool:
        """True when done without an error."""
        return all(o.done and o.error is None for o in self._operations)

    def exception(self) -> Any:
        """The first error, or None."""
        return next((o.error for o in self._operations if o.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result; empty after an interruption."""
        return [tensor for operation in self._operations for tensor in operation.result]

    def source_rank(self) -> int:
        """The group rank from which a receive got its data."""
        if len(self._operations) != 1:
            raise ConfigurationError("source_rank() of a coalesced operation has no meaning")
        return self._operations[0].source_rank

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A torch future of result()."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._settle(0)
        return self._future

    def _settle(self, index: int) -> None:
        if index < len(self._operations):
            self._links.when_done(self._operations[index], lambda: self._settle(index + 1))
            return
        error = self.exception()
        if error is None:
            self._future.set_result(self.result())
        else:
            c10d_tables.fail_future(self._future, error)
