"""One communicator of a device: how it is made, what is in flight on it, and its abort."""

import hashlib
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from torch._C._distributed_c10d import Store

from elaswave_plugin.communicator.device.ordered_sums import Combine
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import ANY_SOURCE, Group, Operation, Steps
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts
from elaswave_plugin.errors import ConfigurationError, LinkError

_SIZES = struct.Struct("<II")  # bytes of the key, bytes of the value
_TAG = 0


class LinkStore(Store):
    """Enough of a store for backends to meet: set, get, check and wait.

    No server and no thread: a member that waits for a key reads what the others have sent.  It
    belongs to one group and follows its members.  Raises EpochChanged out of every wait.
    """

    def __init__(
        self, links: LinkTable, name: str, members: Sequence[int], *, timeout_s: float
    ) -> None:
        """`members` are slots in rank order, alike on all of them; `name` names the store."""
        super().__init__()
        self._links = links
        self._name = name
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._reading = threading.Lock()
        digest = hashlib.blake2b(f"store of {name}".encode(), digest_size=8).digest()
        self._id = int.from_bytes(digest, "big")
        self.follow(members)

    def follow(self, members: Sequence[int]) -> None:
        """The members have changed; what was set stays."""
        slots = tuple(members)
        self._group = Group(
            number=self._id,
            label=f"store of {self._name}",
            members=slots,
            rank=slots.index(self._links.slot),
        )

    def set(self, key: str, value: Any) -> None:
        """Keep it and send it to all other members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        name = key.encode()
        sizes = memoryview(_SIZES.pack(len(name), len(data)))
        payload = memoryview(name + data)

        def body(op: Operation) -> Steps:
            for rank in op.others():
                op.send(rank, sizes)
                op.send(rank, payload, part=1)
            yield from ()

        operation = self._operation(f"set {key!r}", self._timeout_s)
        self._links.run(operation, body)
        self._links.wait(operation)

    def get(self, key: str) -> bytes:
        """The value; blocks until a member sets it. Raises LinkError after the timeout."""
        self._read_until([key], self._timeout_s)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have arrived, among what has been read so far."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. Raises LinkError after the timeout, EpochChanged."""
        self._read_until(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Refuse: no member owns a key."""
        raise ConfigurationError(
            f"add({key!r}, {value}) on the store of {self._name!r} is not supported: it has set, "
            "get, check and wait"
        )

    def _read_until(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._reading:
            while missing := [key for key in keys if key not in self._values]:
                self._read(f"wait for {missing}", deadline_s - time.monotonic())

    def _read(self, what: str, timeout_s: float) -> None:
        """Take one key and its value from the next sender."""
        sizes = bytearray(_SIZES.size)

        def body(op: Operation) -> Steps:
            head = op.receive(ANY_SOURCE, memoryview(sizes))
            yield head
            key_bytes, value_bytes = _SIZES.unpack(sizes)
            payload = bytearray(key_bytes + value_bytes)
            rank = op.group.members.index(head.peer)
            yield op.receive(rank, memoryview(payload), part=1)
            self._values[payload[:key_bytes].decode()] = bytes(payload[key_bytes:])

        operation = self._operation(what, timeout_s)
        self._links.run(operation, body)
        self._links.wait(operation)

    def _operation(self, what: str, timeout_s: float) -> Operation:
        return Operation(self._links, self._group, what, timeout_s=timeout_s, tag=_TAG)


if TYPE_CHECKING:
    import torch

# A call that has not returned after this long is blocked inside, where an abort alone releases it.
LAUNCH_LIMIT_S = 1.0


class Inner(Protocol):
    """A group of a native backend. `calls` answers the c10d calls of a ProcessGroup.

    `waits_on_host`: wait() of its works blocks the calling thread, and not only the stream.
    """

    @property
    def calls(self) -> Any:
        """The backend of which the calls of c10d are made."""

    @property
    def waits_on_host(self) -> bool:
        """True if the backend knows no streams."""

    @property
    def failed(self) -> bool:
        """True if the backend has seen an error on it."""

    def connect(self) -> None:
        """Connect all members, each of which calls it or a collective; once, before any block."""

    def mark(self) -> Any:
        """A work for what runs on the current stream, where a call answers None.

        It is complete when all is that this stream holds now; wait() orders a stream behind that.
        """

    def apart(self, tensors: "Sequence[torch.Tensor]") -> AbstractContextManager[None]:
        """Run calls on these tensors behind what the current stream holds, beside what comes."""

    def shrink(self, excluded: Sequence[int]) -> "Inner":
        """The group without these ranks; all others call it together."""

    def abort(self) -> None:
        """End everything in flight and release it. From any thread."""

    def close(self) -> None:
        """End it in peace: nothing is in flight and all members do so."""


class Maker(Protocol):
    """Makes native groups. `shrinks`: shrink() returns in the installed version.

    `combine`: adds the terms of ordered sums on its devices.
    """

    @property
    def device_type(self) -> str:
        """The kind of device."""

    @property
    def shrinks(self) -> bool:
        """True if a communicator can lose members in place."""

    @property
    def combine(self) -> Combine:
        """The sum of rows in rank order."""

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        """A new group, of which every member makes its part."""


class Communicator:
    """A native group, what it was made of and what was launched on it."""

    def __init__(
        self, name: str, members: tuple[int, ...], inner: Inner, store: LinkStore, *, shrinks: bool
    ) -> None:
        self.name = name
        self.members = members
        self.inner = inner
        self.store = store
        self.connected = self.is_used = False
        self._broken = False
        self._block: int | None = None
        self._shrinks = shrinks
        self._collectives = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._pending: deque[Any] = deque()
        self._launching = 0
        self._counting = threading.Condition()
        self._abort: threading.Thread | None = None
        self._released = False
        self._abort_error: BaseException | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """It counts as in flight for the time of a call that may block."""
        with self._counting:
            self._launching += 1
        try:
            yield
        finally:
            with self._counting:
                self._launching -= 1
                self._counting.notify_all()

    @property
    def coalescing(self) -> bool:
        """True if a block is open; the end of the block launches its calls."""
        return self._block is not None

    @property
    def opened_here(self) -> bool:
        """True if this thread has opened the block: NCCL keeps open blocks by thread."""
        return self._block == threading.get_ident()

    def open_block(self) -> None:
        """This thread has begun a block."""
        self._block = threading.get_ident()

    def close_block(self) -> None:
        """It has ended."""
        with self._counting:
            self._block = None
            self._counting.notify_all()

    def give_up(self) -> None:
        """A call has failed: what it did until then may differ between members."""
        self._broken = True

    def count(self, call: str, peer: int | None) -> None:
        """Note a call; `peer` is the group rank of a point-to-point one."""
        with self._counting:
            if peer is None:
                self._collectives += 1
            elif call == "send":
                self._sent[self.members[peer]] += 1
            else:
                self._received[self.members[peer]] += 1

    def track(self, work: Any) -> None:
        """Remember a work until it is complete."""
        with self._counting:
            self._prune()
            self._pending.append(work)

    def _prune(self) -> None:
        pending = self._pending
        while pending and pending[0].is_completed():
            pending.popleft()

    @property
    def idle(self) -> bool:
        """True if all that was launched is complete, without an error."""
        with self._counting:
            if self._launching or self.coalescing or self._broken or self.aborted:
                return False
            return all(work.is_completed() for work in self._pending) and not self.inner.failed

    def facts(self) -> CommunicatorFacts:
        """For the commit."""
        return CommunicatorFacts(
            name=self.name,
            members=self.members,
            collectives=self._collectives,
            sent=dict(self._sent),
            received=dict(self._received),
            idle=self.idle,
            shrinks=self._shrinks,
        )

    # ---- the end -----------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        """True if abort() has begun."""
        return self._abort is not None

    @property
    def released(self) -> bool:
        """True once abort() touches the native group; no other call may touch it from then on."""
        return self._released

    def abort(self) -> None:
        """Begin to abort, in a thread of its own so that several do so at once. Idempotent.

        An abort frees what a call in another thread still uses: it waits for calls that return.
        """
        with self._counting:
            if self._abort is not None:
                return
            # A native abort may never return; a daemon thread does not hold up the exit.
            self._abort = threading.Thread(
                target=self._run_abort, name=f"elaswave-abort-{self.name}", daemon=True
            )
            self._abort.start()

    def _run_abort(self) -> None:
        run: Callable[[], None] = self.inner.abort
        with self._counting:
            self._counting.wait_for(
                lambda: not self._launching and not self.coalescing, LAUNCH_LIMIT_S
            )
            self._released = True
        try:
            run()
        except BaseException as error:  # its join raises it
            self._abort_error = error

    def await_abort(self, timeout_s: float) -> None:
        """Wait for abort() to end. Raises its error; LinkError after the timeout."""
        thread = self._abort
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            raise LinkError(
                f"the communicator {self.name!r} (slots {self.members}) is not aborted after "
                f"{timeout_s:g} s; this worker cannot go on"
            )
        if self._abort_error is not None:
            raise self._abort_error
