"""The workers of a job as threads of this process: real links and snapshots, no process started.

The frameworks keep what belongs to a process in globals of their modules. So the workers take
turns: one runs at a time, with those globals as it has left them, and the next one has its turn
where the one before waits for its links.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Operation
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.ipc.snapshot_record import BUFFERS
from elaswave_plugin.snapshot.restore import Access
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool
from tests.agent.serving import SlotStore, serve
from tests.job_secret import SECRET

LIMIT_S = 20.0
CAPACITY_BYTES = 1 << 20
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
Result = TypeVar("Result")
_NEVER_CHANGE = (FunctionType, ModuleType, type)


class Turns:
    """The lock of the one who runs, with the globals of its process."""

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        """``modules``: those of which every process has the globals for itself."""
        self._places = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if not (name.startswith("__") or issubclass(type(value), _NEVER_CHANGE))
        ]
        self._lock = threading.Lock()
        self._before = self._globals()
        self._of: dict[int, list[Any]] = {}
        self.slot: int | None = None

    def _globals(self) -> list[Any]:
        return [module[name] for module, name in self._places]

    def _install(self, values: Sequence[Any]) -> None:
        for (module, name), value in zip(self._places, values, strict=True):
            module[name] = value

    def forget(self) -> None:
        """These workers are gone; the next ones begin as processes do."""
        self._of.clear()
        self._install(self._before)

    @contextmanager
    def of(self, slot: int) -> Iterator[None]:
        """Run as this worker."""
        self._take(slot)
        try:
            yield
        finally:
            self._leave(slot)

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """Let others run, as this worker waits."""
        slot = self.slot
        assert slot is not None
        self._leave(slot)
        try:
            yield
        finally:
            self._take(slot)

    def _take(self, slot: int) -> None:
        assert self._lock.acquire(timeout=LIMIT_S), f"worker {slot} never had its turn"
        if slot in self._of:
            self._install(self._of[slot])
        else:
            # Tables of its own.
            self._install([_copied(value) for value in self._before])
            tables: Any = c10d
            tables._world = tables._World()
        self.slot = slot

    def _leave(self, slot: int) -> None:
        self._of[slot] = self._globals()
        self.slot = None
        self._lock.release()


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


class Memory:
    """The snapshot memory of a slot and its agent's server, for all jobs of this process."""

    def __init__(self, slot: int) -> None:
        self.store = SlotStore(slot)
        self.address = serve(self.store)
        self.pool = SnapshotPool(
            self.store.fds[:BUFFERS],
            slot=slot,
            capacity_bytes=CAPACITY_BYTES,
            needed_bytes=0,
            available_bytes=0,
        )


@dataclass
class Seat:
    """A worker: its thread, links, groups and framework."""

    slot: int
    memory: Memory
    links: LinkTable
    groups: GroupTable
    framework: Any = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    create: Callable[[Any, Any], Any] | None = None

    @property
    def access(self) -> Access:
        """Its way to sealed state."""
        return Access(slot=self.slot, pool=self.memory.pool, secret=SECRET, timeout_s=LIMIT_S)


class OneProcess:
    """All workers of a job, and what they share: this process."""

    def __init__(self, patch: pytest.MonkeyPatch, modules: Sequence[ModuleType]) -> None:
        self.turns = Turns([c10d, *modules])
        self.seats: list[Seat] = []
        self.memories: list[Memory] = []
        # Rises over all jobs, since their snapshots lie in the same memory.
        self.epoch = 0
        native = LinkTable.wait

        def wait(table: LinkTable, operation: Operation, timeout_s: float | None = None) -> None:
            if operation.done:
                native(table, operation, timeout_s)
                return
            with self.turns.of_others():
                native(table, operation, timeout_s)

        patch.setattr(LinkTable, "wait", wait)
        # Torch has one table of backends, and each worker registers its own.
        c10d_tables.register_backend(self._create)
        patch.setattr(c10d_tables, "register_backend", self._register)
        for name in PLACE:
            patch.setenv(name, "0")
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]

    def _register(self, create: Callable[[Any, Any], Any]) -> None:
        self._present.create = create

    def _create(self, options: Any, more: Any) -> Any:
        create = self._present.create
        assert create is not None
        return create(options, more)

    @property
    def _present(self) -> Seat:
        assert self.turns.slot is not None
        return self.seats[self.turns.slot]

    def start(self, width: int, build: Callable[[Seat], Any]) -> None:
        """Begin a job of ``width`` workers, each with what ``build`` makes as its framework."""
        self.end()
        while len(self.memories) < width:
            self.memories.append(Memory(len(self.memories)))
        for slot in range(width):
            links = LinkTable(slot, secret=SECRET)
            self.seats.append(Seat(slot, self.memories[slot], links, GroupTable(links)))
        slots = range(width)
        self.open(slots)

        def begin(seat: Seat) -> None:
            for name, value in zip(PLACE, (seat.slot, seat.slot, width), strict=True):
                os.environ[name] = str(value)
            dist.init_process_group(**seat.groups.install(slots))
            seat.framework = build(seat)

        self.each(slots, begin)

    def open(self, slots: Iterable[int]) -> None:
        """Open the next view's links between these."""
        self.epoch += 1
        chosen = [self.seats[slot] for slot in slots]
        addresses = {seat.slot: seat.links.address for seat in chosen}
        for seat in chosen:
            if seat.links.epoch:
                seat.links.interrupt(self.epoch, "a change")
            seat.links.open_epoch(self.epoch, addresses)

    def each(self, slots: Iterable[int], act: Callable[[Seat], Result]) -> dict[int, Result]:
        """Have all of these do the same, each in its thread; raises what the first has raised."""

        def run(seat: Seat) -> Result:
            with self.turns.of(seat.slot):
                try:
                    return act(seat)
                except BaseException as error:
                    # Nobody waits for one that has failed.
                    failed.append(error)
                    for other in self.seats:
                        other.links.interrupt(self.epoch + 1, f"worker {seat.slot} failed")
                    raise

        failed: list[BaseException] = []
        runs = {slot: self.seats[slot].thread.submit(run, self.seats[slot]) for slot in slots}
        results = {}
        for slot, one in runs.items():
            if one.exception(LIMIT_S) is None:
                results[slot] = one.result()
        if failed:
            self.epoch += 1
            raise failed[0]
        return results

    def end(self) -> None:
        """End the job that there is."""
        for seat in self.seats:
            seat.thread.shutdown()
            seat.links.close()
        self.seats.clear()
        self.turns.forget()

    def close(self) -> None:
        """End the job, and let go of the memory."""
        self.end()
        for memory in self.memories:
            memory.pool.close()
            memory.store.close()
        c10d_tables.unregister_backend()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
