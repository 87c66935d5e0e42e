"""One communicator of a device: what was launched on it, what is in flight, and its abort."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from elaswave_plugin.communicator.device.link_store import LinkStore
from elaswave_plugin.communicator.device.ordered_kernel import Combine
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts
from elaswave_plugin.errors import LinkError

if TYPE_CHECKING:
    import torch

# A call that has not returned after this long is blocked inside, where an abort alone releases it.
LAUNCH_LIMIT_S = 1.0


class Inner(Protocol):
    """A group of a native backend. `calls` answers the c10d calls of a ProcessGroup.

    `waits_on_host`: wait() of its works blocks the calling thread, and not only the stream.
    """

    @property
    def calls(self) -> Any: ...
    @property
    def waits_on_host(self) -> bool: ...
    @property
    def failed(self) -> bool:
        """True if the backend has seen an error on it."""

    def connect(self) -> None:
        """Connect all members, each of which calls it or a collective; once, before any block."""

    def mark(self) -> Any:
        """A work for what runs on the current stream, where a call answers None.

        It is complete when all is that this stream holds now; wait() orders a stream behind that.
        """

    def apart(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Run calls on these tensors behind what the current stream holds, beside what comes."""

    def shrink(self, excluded: Sequence[int]) -> Inner:
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
    def device_type(self) -> str: ...
    @property
    def shrinks(self) -> bool: ...
    @property
    def combine(self) -> Combine: ...
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
