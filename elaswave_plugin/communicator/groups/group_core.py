"""A process group: its members as data, its names, and how its operations start."""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from elaswave_plugin.communicator.groups import algorithms, c10d_tables
from elaswave_plugin.communicator.links import detached
from elaswave_plugin.communicator.links.buffers import Fold, make_fold
from elaswave_plugin.communicator.links.frames import DTYPES
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation, Steps
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


# GPU tensors go through host memory.
DEVICES = ("cpu", "cuda")

Tensors = Sequence[torch.Tensor]
Body = Callable[[Operation], Steps]
Core = TypeVar("Core", bound="GroupCore")


class GroupCore:
    """Membership and plumbing of a group; slots are ours, ranks are positions in `members`."""

    def __init__(
        self,
        links: LinkTable,
        name: str,
        members: Sequence[int],
        *,
        timeout_s: float,
        on_shutdown: Callable[[str], None],
    ) -> None:
        self._name = name
        self._description = ""
        self._links = links
        self._identity = name
        self._group_id = _digest(name)
        self._timeout_s = timeout_s
        self._on_shutdown = on_shutdown
        self._coalesced: list[Operation] | None = None
        self._group = self._as_group(members)

    # ---- membership --------------------------------------------------------------------------

    def _as_group(self, members: Sequence[int]) -> Group:
        slot = self._links.slot
        return Group(
            number=self._group_id,
            label=self._name if self._description in ("", "undefined") else self._description,
            members=tuple(members),
            rank=members.index(slot) if slot in members else -1,
        )

    @property
    def group_id(self) -> int:
        """The number that the group's messages carry: a digest of its name, or of its identity."""
        return self._group_id

    @property
    def identity(self) -> str:
        """The name that all members use for the group: its own, until an edit says otherwise."""
        return self._identity

    @property
    def members(self) -> tuple[int, ...]:
        """Slots in rank order."""
        return self._group.members

    def edit(self, members: Sequence[int], identity: str | None = None) -> None:
        """Replace the members, slots in rank order. Raises ConfigurationError for duplicates.

        ``identity``: what all members call the group from now on, where their names for it differ.
        """
        if len(set(members)) != len(members):
            raise ConfigurationError(f"group {self.group_name!r}: duplicate slots in {members}")
        self._coalesced = None
        if identity is not None:
            self._identity, self._group_id = identity, _digest(identity)
        self._group = self._as_group(members)

    def rank(self) -> int:
        """Our rank; -1 when we are not a member."""
        return self._group.rank

    def size(self) -> int:
        """Number of members."""
        if self._links.asked is not None:
            self._links.asked()
        return self._group.size

    getRank = rank
    getSize = size

    def name(self) -> str:
        """The name of the backend."""
        return "elaswave"

    getBackendName = name
    _get_backend_name = name

    # The base class keeps names and descriptions in its backends, of which we have none.

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The caller's description of the group."""
        return self._description

    def getGroupName(self) -> str:
        """The same as group_name."""
        return self._name

    def getGroupDesc(self) -> str:
        """The same as group_desc."""
        return self._description

    def setGroupName(self, name: str) -> None:
        """Torch repeats the name that the group was made with."""
        if name != self._name:
            raise ConfigurationError(f"group {self._name!r} cannot be renamed to {name!r}")

    def setGroupDesc(self, description: str) -> None:
        """Remember the description; messages use it."""
        self._description = description
        self._group = self._as_group(self.members)

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES]

    def _get_backend(self, device: torch.device | str) -> Any:
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(f"group {self._name!r} has no backend for device {device}")
        return self

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Every operation has a Work of its own to wait for."""

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers begin at 0 with every epoch."""

    def _get_sequence_number_for_group(self) -> int:
        return self._links.sequence(self._group_id)

    def _register_on_completion_hook(self, hook: object) -> None:
        raise self._refuse("_register_on_completion_hook", "is not supported: use get_future()")

    def _enable_collectives_timing(self) -> None:
        raise self._refuse("_enable_collectives_timing", "is not supported: time the calls")

    def split_group(self, *_: object, **__: object) -> Any:
        """Refused: a part of a group is a new_group()."""
        raise self._refuse("split_group", "is not supported: use new_group()")

    def merge_remote_group(self, *_: object, **__: object) -> Any:
        """Refused: workers join with a view, which edits the groups."""
        raise self._refuse("merge_remote_group", "is not supported: use new_group()")

    @property
    def supports_splitting(self) -> bool:
        """There is nothing to split: a group is a list of slots."""
        return False

    # Torch 2.15 asks for these before it reconfigures, opens a window or hooks an abort.
    supports_reconfigure = supports_window = supports_abort_hooks = supports_splitting

    @property
    def supports_coalescing(self) -> bool:
        """True: see _start_coalescing."""
        return True

    @property
    def timeout_s(self) -> float:
        """Seconds after which an operation that is not interrupted fails."""
        return self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """The time after which an operation that is not interrupted fails."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group table."""
        self._on_shutdown(self._name)

    abort = shutdown

    def __repr__(self) -> str:
        return f"ElasticProcessGroup({self.group_name!r}, slots {self.members})"

    # ---- starting operations -----------------------------------------------------------------

    def begins(self, call: str) -> None:
        """A call starts; raises whatever the watch of the links does."""
        if self._links.asked is not None:
            self._links.asked()
        if self._links.watch is not None:
            self._links.watch(call, self.members)

    @property
    def _run(self) -> Any:
        """The module of the collectives."""
        return detached if self._links.detached else algorithms

    def _start(
        self,
        name: str,
        body: Body,
        result: Tensors,
        opts: Any = None,
        *,
        dtype: torch.dtype | None = None,
        tag: int | None = None,
        timeout: timedelta | None = None,
    ) -> Operation:
        """Start it; members must call it with the same `dtype` (None: any).

        ``timeout``: where the call has it beside its `opts`.
        """
        self.begins(name)
        timeout = timeout or getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None else -1.0
        operation = Operation(
            self._links,
            self._group,
            name,
            timeout_s=timeout_s if timeout_s > 0 else self._timeout_s,
            dtype=_dtype_name(dtype),
            tag=tag,
            result=list(result),
        )
        if self._group.rank < 0:
            raise ConfigurationError(
                f"{operation.describe()}: slot {self._links.slot} is no member"
            )
        self._links.run(operation, body)
        return operation

    def _work(self, operations: Sequence[Operation]) -> ElasticWork:
        if self._coalesced is not None:
            self._coalesced.extend(operations)
        return ElasticWork(self._links, operations)

    def _refuse(self, what: str, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what} in group {self.group_name!r} (slots {self.members}) {why}"
        )

    @staticmethod
    def reduction(opts: Any = "SUM") -> str:
        """The name of a call's reduction, from its options."""
        wanted = getattr(opts, "reduceOp", opts)
        kind = getattr(wanted, "op", wanted)
        return str(getattr(kind, "name", kind))

    def _fold(self, what: str, opts: Any, dtype: torch.dtype) -> Fold:
        try:
            return make_fold(self.reduction(opts), dtype)
        except ConfigurationError as error:
            raise self._refuse(what, str(error)) from error

    def _dense(self, what: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type not in DEVICES or tensor.layout is not torch.strided:
                raise self._refuse(
                    what,
                    f"got a {tensor.layout} tensor on {tensor.device}: the links carry dense "
                    f"tensors on {' and '.join(DEVICES)}",
                )

    def _single(self, what: str, tensors: Tensors | torch.Tensor) -> torch.Tensor:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1:
            raise self._refuse(what, f"got {len(tensors)} tensors: it takes one")
        self._dense(what, tensors[0])
        return tensors[0]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _dtype_name(dtype: torch.dtype | None) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else "any"
