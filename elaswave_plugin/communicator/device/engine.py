"""The communicators of all groups for one kind of device: made on first use, epoch by epoch."""

import hashlib
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from elaswave_plugin.communicator.device.communicator import Communicator, LinkStore, Maker
from elaswave_plugin.communicator.groups.group_core import GroupCore
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation, Receive, Steps
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts, Fate, Verdict, fate_of
from elaswave_plugin.errors import EpochChanged, LinkError
from elaswave_plugin.ipc.progress_page import CONNECTION, MOST_ENTERED, ProgressPage


class Entered:
    """The native calls that a worker has entered, on its page: who is behind is seen there.

    A native call blocks in the backend or on the device, and nothing tells which member it needs.
    But a member that has entered more calls on a communicator than another one waits for that one,
    or will. Of more than MOST_ENTERED communicators some are not told.
    """

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        # The doorbell's thread ends communicators.
        self._changing = threading.Lock()
        # By communicator and channel: the place on the page, and the calls so far.
        self._counts: dict[tuple[str, str], list[int]] = {}

    def count(
        self, name: str, members: Sequence[int], call: str, me: int, peer: int | None
    ) -> None:
        """Note a call on a communicator, before it is made: a collective, or one with a ``peer``.

        ``me`` and ``peer`` are group ranks. A message counts alike at both of its ends.
        """
        channel = ""
        if peer is not None:
            source, target = (me, peer) if call == "send" else (peer, me)
            channel = f"{members[source]}>{members[target]}"
        self._page.count_operation()
        key = name, channel
        with self._changing:
            place = self._counts.get(key)
            if place is None:
                free = set(range(MOST_ENTERED)) - {index for index, _ in self._counts.values()}
                if not free:
                    return
                place = self._counts[key] = [min(free), 0]
            place[1] += 1
            self._page.set_entered(place[0], _number(f"{name} {channel}"), place[1])

    def keep(self, names: Container[str]) -> None:
        """All communicators but these have ended, or will on all of their members."""
        with self._changing:
            for key in [one for one in self._counts if one[0] not in names]:
                self._page.set_entered(self._counts.pop(key)[0], 0, 0)


def _number(text: str) -> int:
    """A number of seven bytes, which is alike on all workers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


_SHORTEST_POLL_S = 20e-6
_LONGEST_POLL_S = 1e-3


class DeviceWork(Work):
    """A work of one communicator.

    wait() orders the current stream behind it, as NCCL's does, and blocks the host only where a
    limit is given or the backend knows no streams.
    """

    def __init__(
        self,
        engine: "DeviceEngine",
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


# An abort ends kernels in flight; after this long the worker cannot go on and says so.
ABORT_TIMEOUT_S = 60.0
# A backend may see that a peer is gone before the doorbell rings, which then follows at once.
DOORBELL_TIMEOUT_S = 2.0

Answers = Mapping[int, Mapping[str, CommunicatorFacts]]
"""slot -> name of a communicator -> what that worker knows of it, as committed."""
Result = TypeVar("Result")


class DeviceEngine:
    """Native communicators under elastic groups.

    The doorbell aborts what is in flight, from its own thread, so that a thread that waits for the
    device in a place of which we know nothing comes back too.  `settle` then decides from the facts
    of all members which of the others go on.  Nothing is destroyed while others may need it.
    """

    def __init__(self, links: LinkTable, maker: Maker) -> None:
        self.device_type = maker.device_type
        self.combine = maker.combine
        self.bell = threading.Event()
        self._links = links
        self._entered = Entered(links.page)
        self._maker = maker
        # By the name that this member has for the group; a communicator's own is alike on all.
        self._live: dict[str, Communicator] = {}
        self._shrinking: set[str] = set()
        self._ended: list[Communicator] = []
        self._blocks: dict[str, tuple[Communicator, Any]] = {}
        self._stuck = ""
        self._epoch = 0
        self._making = threading.Lock()
        # Held for moments only: the doorbell's thread and the one that recovers both end things.
        self._ending = threading.RLock()

    # ---- operations --------------------------------------------------------------------------

    def launch(
        self,
        group: GroupCore,
        call: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        peer: int | None = None,
    ) -> DeviceWork:
        """Make the c10d call on the group's communicator. Raises EpochChanged."""
        try:
            return self._launch(group, call, args, kwargs, peer)
        except BaseException:
            self._leave_block(group.group_name)
            raise

    def _launch(
        self,
        group: GroupCore,
        call: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        peer: int | None,
    ) -> DeviceWork:
        group.begins(call)
        communicator = self._communicator(group)
        run = getattr(communicator.inner.calls, call)

        def make() -> Any:
            name, members = communicator.name, communicator.members
            self._entered.count(name, members, call, me=group.rank(), peer=peer)
            communicator.count(call, peer)
            inner = run(*args, **kwargs)
            if inner is None:
                inner = communicator.inner.mark()
            # In a block that coalesces, the only work is that of its end.
            if not communicator.coalescing:
                communicator.track(inner)
            return inner

        with communicator.busy(), self._connecting(communicator):
            inner = self.guard(communicator, make)
            communicator.connected |= peer is None
        return self._work(group, communicator, inner, call)

    def run(
        self,
        group: GroupCore,
        what: str,
        calls: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        *,
        asynchronous: bool,
    ) -> DeviceWork:
        """Make calls and kernels that follow each other one work. Raises EpochChanged.

        `asynchronous`: the current stream does not wait for them; the `tensors` are what they use.
        """
        group.begins(what)
        communicator = self._communicator(group)
        inner = communicator.inner
        # Busy to the end: an abort has to come after the last kernel, which writes for the caller.
        with communicator.busy(), inner.apart(tensors) if asynchronous else nullcontext():
            try:
                calls()
            finally:
                mark = inner.mark()
                communicator.track(mark)
        return self._work(group, communicator, mark, what)

    def is_coalescing(self, group: GroupCore) -> bool:
        """Return whether a block of the group is open."""
        return group.group_name in self._blocks

    def start_coalescing(self, group: GroupCore, device: Any) -> None:
        """Collect the calls that follow into one. Raises EpochChanged."""
        communicator = self._communicator(group)
        with communicator.busy():
            if not communicator.connected:
                # Where connecting fails within a block, torch has left it and counts it as open.
                with self._connecting(communicator):
                    self.guard(communicator, communicator.inner.connect)
                communicator.connected = True
            self.check(communicator)
            communicator.inner.calls._start_coalescing(device)
            communicator.open_block()
            self._blocks[group.group_name] = communicator, device

    def end_coalescing(self, group: GroupCore, device: Any) -> DeviceWork:
        """Launch what was collected. Raises EpochChanged, also when the start was before it."""
        if group.group_name not in self._blocks:
            raise self._change()
        communicator, _ = self._blocks[group.group_name]
        inner = self._end_block(group.group_name)
        self.check(communicator)
        return self._work(group, communicator, inner, "coalesced calls")

    def _end_block(self, name: str) -> Any:
        """End it whatever has happened: until then NCCL only collects what this thread calls."""
        communicator, device = self._blocks.pop(name)

        def end() -> Any:
            if communicator.released:
                raise RuntimeError("its communicator is aborted already")
            inner = communicator.inner.calls._end_coalescing(device)
            if inner is None:
                inner = communicator.inner.mark()
            communicator.track(inner)
            return inner

        with communicator.busy():
            try:
                return self._native(communicator, end)
            except BaseException as error:
                self._stuck = f"the end of a block of {communicator.name!r} failed: {error}"
                raise
            finally:
                communicator.close_block()

    def _leave_block(self, name: str) -> None:
        """End a block of this thread on the way out of it; `settle` tells where that failed."""
        block = self._blocks.get(name)
        if block is not None and block[0].opened_here:
            with suppress(Exception, EpochChanged):
                self._end_block(name)

    def _work(
        self, group: GroupCore, communicator: Communicator, inner: Any, call: str
    ) -> DeviceWork:
        what = f"{call} in group {group.group_name!r} (slots {group.members})"
        return DeviceWork(self, communicator, inner, what, group.timeout_s)

    # ---- interruptions -----------------------------------------------------------------------

    def interruption(self, communicator: Communicator) -> EpochChanged | None:
        """Why nothing of this communicator counts any more, or None."""
        if communicator.aborted or self._links.interrupted is not None:
            return self._change()
        return None

    def _change(self) -> EpochChanged:
        interrupted = self._links.interrupted
        return EpochChanged(*(interrupted or (self._links.epoch, "the communicator is aborted")))

    def check(self, communicator: Communicator) -> None:
        """Raise EpochChanged when interrupted."""
        change = self.interruption(communicator)
        if change is not None:
            raise change

    def _tell_entered(self) -> None:
        self._entered.keep({one.name for one in list(self._live.values())})

    @contextmanager
    def _connecting(self, communicator: Communicator | None = None) -> Iterator[None]:
        """Announce that a communicator is made, or used first: its members look for each other."""
        if communicator is not None:
            if communicator.is_used:
                yield
                return
            communicator.is_used = True
        self._links.page.announce(CONNECTION)
        try:
            yield
        finally:
            self._links.page.end_announced()

    def guard(self, communicator: Communicator, call: Callable[[], Result]) -> Result:
        """Make a native call. Raises EpochChanged for whatever an abort or a loss makes of it."""
        self.check(communicator)
        result = self._native(communicator, call)
        self.check(communicator)
        return result

    def _native(self, communicator: Communicator, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except BaseException as error:
            communicator.give_up()
            if not isinstance(error, Exception):
                raise
            change = self.interruption(communicator)
            if change is None and isinstance(error, RuntimeError):
                self.bell.wait(DOORBELL_TIMEOUT_S)
                change = self.interruption(communicator)
            if change is not None:
                raise change from error
            raise

    def _listen(self) -> None:
        """Have the link table tell us of the next interruption: it ends this operation, only it."""
        name = "doorbell of the device engine"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        slot = self._links.slot
        group = Group(number=int.from_bytes(digest, "big"), label=name, members=(slot,), rank=0)
        operation = Operation(self._links, group, name, timeout_s=0.0, tag=0)

        def never(op: Operation) -> Steps:
            silent: Receive = op.receive(0, memoryview(bytearray(1)))
            yield silent

        epoch = self._epoch
        self._links.run(operation, never)
        self._links.when_done(operation, lambda: self._rung(epoch))

    def _rung(self, epoch: int) -> None:
        """In the doorbell's thread: abort what is in flight. Must not wait."""
        with self._ending:
            if epoch == self._epoch:
                self.bell.set()
                self._abort_busy()

    def _abort_busy(self) -> None:
        self._abort([name for name, one in list(self._live.items()) if not one.idle])

    def _abort(self, names: Iterable[str]) -> None:
        with self._ending:
            for name in names:
                communicator = self._live.pop(name, None)
                self._shrinking.discard(name)
                if communicator is not None:
                    communicator.abort()
                    self._ended.append(communicator)
            self._tell_entered()

    def _await_aborts(self) -> None:
        deadline_s = time.monotonic() + ABORT_TIMEOUT_S
        while self._ended:
            self._ended[0].await_abort(max(0.0, deadline_s - time.monotonic()))
            del self._ended[0]

    # ---- epochs ------------------------------------------------------------------------------

    def facts(self) -> dict[str, CommunicatorFacts]:
        """Describe this member's communicators for the commit; call it when nothing is launched."""
        for name in list(self._blocks):
            self._leave_block(name)
        self._abort_busy()
        return {one.name: one.facts() for one in list(self._live.values())}

    def settle(
        self, members: Mapping[str, tuple[int, ...]], answers: Answers
    ) -> dict[str, Verdict]:
        """Enter the epoch of the link table: keep, mark for shrinking, or abort each communicator.

        `members`: this member's name of a group -> slots in rank order from now on. All members
        call it with the same answers. Raises LinkError when an abort does not end, or a block.
        """
        if self._stuck:
            raise LinkError(f"{self._stuck}; this worker cannot go on")
        verdicts: dict[str, Verdict] = {}
        for name, communicator in list(self._live.items()):
            made = communicator.name
            held = {slot: theirs.get(made) for slot, theirs in answers.items()}
            verdicts[name] = fate_of(made, held, members.get(name, ()))
        with self._ending:
            self._epoch = self._links.epoch
            self.bell.clear()
            self._abort([n for n, verdict in verdicts.items() if verdict.fate is Fate.ABORT])
            self._shrinking = {n for n, verdict in verdicts.items() if verdict.fate is Fate.SHRINK}
        self._await_aborts()
        self._tell_entered()
        self._listen()
        return verdicts

    def _communicator(self, group: GroupCore) -> Communicator:
        """The group's communicator in this epoch, made or shrunk on first use."""
        name = group.group_name
        communicator = self._live.get(name)
        settled = self._epoch == self._links.epoch
        if communicator is not None and settled and name not in self._shrinking:
            return communicator
        if self._links.interrupted is not None:
            raise self._change()
        with self._making:
            if self._epoch != self._links.epoch:
                # Nobody has told us what the others hold, so nothing can be kept.
                self.settle({}, {})
            communicator = self._live.get(name)
            if communicator is None:
                return self._make(group)
            if name in self._shrinking:
                return self._shrink(group, communicator)
            return communicator

    def _make(self, group: GroupCore) -> Communicator:
        name = f"{group.identity}@{self._epoch}"
        store = LinkStore(self._links, name, group.members, timeout_s=group.timeout_s)
        with self._connecting():
            inner = self._maker.make(store, name, group.rank(), group.size())
        return self._install(
            group, Communicator(name, group.members, inner, store, shrinks=self._maker.shrinks)
        )

    def _shrink(self, group: GroupCore, parent: Communicator) -> Communicator:
        excluded = [r for r, slot in enumerate(parent.members) if slot not in group.members]
        parent.store.follow(group.members)
        with parent.busy():
            inner = self.guard(parent, lambda: parent.inner.shrink(excluded))
        name = f"{group.identity}@{self._epoch}"
        child = Communicator(name, group.members, inner, parent.store, shrinks=self._maker.shrinks)
        child.connected = child.is_used = True
        self._abort([group.group_name])
        return self._install(group, child)

    def _install(self, group: GroupCore, communicator: Communicator) -> Communicator:
        self._live[group.group_name] = communicator
        return communicator

    def release(self, name: str) -> None:
        """A group is destroyed by its user; all members do so, with nothing in flight."""
        communicator = self._live.get(name)
        if communicator is None:
            return
        if self._links.interrupted is None and communicator.idle:
            del self._live[name]
            self._tell_entered()
            communicator.inner.close()
        else:
            self._abort([name])
