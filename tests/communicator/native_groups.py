"""Stand-ins for NCCL on CPU tensors: one that records its calls, and gloo over our own store."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from elaswave_plugin.communicator.device.communicator import Inner, LinkStore
from elaswave_plugin.communicator.device.ordered_sums import combine_in_a_loop
from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.core.layout.device_groups import CommunicatorFacts
from tests.job_secret import SECRET


class RecordedWork:
    """Complete when the test says so; wait() only notes that the stream would wait."""

    def __init__(self, log: list[str], name: str, done: bool) -> None:
        self.log, self.name, self.done = log, name, done
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done or self.error is not None

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def wait(self) -> bool:
        self.log.append(f"{self.name}.wait")
        return True

    def result(self) -> list[torch.Tensor]:
        return []


class RecordedCalls:
    """Answers every c10d call with a RecordedWork."""

    def __init__(self, group: "RecordedGroup") -> None:
        self._group = group

    def __getattr__(self, call: str) -> Callable[..., RecordedWork | None]:
        group = self._group

        def run(*args: Any, **kwargs: Any) -> RecordedWork | None:
            group.maker.log.append(f"{group.name}.{call}")
            group.maker.on_call(group, call)
            if group.maker.runs_on_the_current_stream:
                return None
            work = RecordedWork(group.maker.log, f"{group.name}.{call}", group.maker.done)
            group.works.append(work)
            return work

        return run


class RecordedGroup:
    """A native group of nobody: notes what is asked of it, in order."""

    def __init__(self, maker: "RecordingMaker", name: str) -> None:
        self.maker, self.name = maker, name
        self.waits_on_host = maker.waits_on_host
        self.calls = RecordedCalls(self)
        self.works: list[RecordedWork] = []
        self.failed = False
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.abort_began = threading.Event()
        self.aborted = threading.Event()

    def connect(self) -> None:
        self.maker.log.append(f"{self.name}.connect")
        self.maker.on_call(self, "connect")

    @contextmanager
    def apart(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        self.maker.log.append(f"{self.name}.apart {len(tensors)}")
        try:
            yield
        finally:
            self.maker.log.append(f"{self.name}.back")

    def mark(self) -> RecordedWork:
        work = RecordedWork(self.maker.log, f"{self.name}.mark", self.maker.done)
        self.works.append(work)
        return work

    def shrink(self, excluded: Sequence[int]) -> Inner:
        self.maker.log.append(f"{self.name}.shrink{list(excluded)}")
        self.maker.on_call(self, "shrink")
        return self.maker.add(f"{self.name}~")

    def abort(self) -> None:
        self.abort_began.set()
        assert self.may_abort.wait(30.0)
        self.maker.log.append(f"{self.name}.abort")
        self.aborted.set()

    def close(self) -> None:
        self.maker.log.append(f"{self.name}.close")


class RecordingMaker:
    """Its groups write what happens to them into one `log`."""

    device_type = "cpu"
    combine = staticmethod(combine_in_a_loop)

    def __init__(self, *, shrinks: bool = False, waits_on_host: bool = False) -> None:
        self.shrinks = shrinks
        self.waits_on_host = waits_on_host
        self.done = True
        self.runs_on_the_current_stream = False
        self.log: list[str] = []
        self.groups: dict[str, RecordedGroup] = {}
        self.on_call: Callable[[RecordedGroup, str], None] = lambda group, call: None

    def add(self, name: str) -> RecordedGroup:
        group = self.groups[name] = RecordedGroup(self, name)
        return group

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        self.log.append(f"make {name} {rank}/{size}")
        return self.add(name)

    def take(self) -> list[str]:
        """Return what has happened since the last call."""
        log, self.log[:] = list(self.log), []
        return log


class StartDetached:
    """Slot 0 of a job of three whose other members are only made up."""

    def __init__(self, **maker: Any) -> None:
        self.links = LinkTable(0, secret=SECRET)
        self.maker = RecordingMaker(**maker)
        self.table = GroupTable(self.links, maker=self.maker)
        self.open(1, (0, 1, 2))

    def open(self, epoch: int, slots: tuple[int, ...]) -> None:
        self.links.open_epoch(epoch, dict.fromkeys(slots, self.links.address))

    def group(self, name: str, members: tuple[int, ...] = (0, 1, 2)) -> DeviceProcessGroup:
        group = self.table.create(name, members)
        assert isinstance(group, DeviceProcessGroup)
        return group

    def answers(
        self, slots: tuple[int, ...], **other: Any
    ) -> dict[int, dict[str, CommunicatorFacts]]:
        """Everybody holds what we hold, but for `other` at the last slot."""
        ours = self.table.device_facts()
        theirs = {name: replace(facts, **other) for name, facts in ours.items()}
        return {s: theirs if s == slots[-1] else ours for s in slots}

    def change(self, epoch: int, slots: tuple[int, ...], dead: set[int], **other: Any) -> None:
        """One whole change of the view."""
        self.links.interrupt(epoch, "test")
        answers = self.answers(slots, **other)
        self.open(epoch, slots)
        self.table.edit_all(slots, dead)
        self.table.settle(answers)


def reduce(group: DeviceProcessGroup) -> Any:
    return group.allreduce([torch.ones(2)])


# Of gloo's works these are not complete before somebody waits for them.
COMPLETED_BY_WAIT = ("send", "recv", "reduce_scatter", "_reduce_scatter")


class AwaitedWork:
    """One of gloo's that a thread waits for."""

    def __init__(self, work: Any) -> None:
        self._work, self.failed = work, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError:
            self.failed = True

    def is_completed(self) -> bool:
        return not self._thread.is_alive() and not self.failed

    is_success = is_completed

    def wait(self) -> bool:
        self._thread.join()
        return True


class GlooWork:
    """A collective of gloo. As a kernel of NCCL's, one that has failed never ends."""

    def __init__(self, work: Any) -> None:
        self._work = work

    @property
    def failed(self) -> bool:
        return bool(self._work.is_completed() and not self._work.is_success())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed() and self._work.is_success())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class GlooCalls:
    """A gloo group that takes a coalesced block, which gloo itself refuses."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._collected: list[Any] | None = None
        self.works: list[Any] = []

    def __getattr__(self, call: str) -> Callable[..., Any]:
        run = getattr(self._group, call)

        def collecting(*args: Any, **kwargs: Any) -> Any:
            work = run(*args, **kwargs)
            work = AwaitedWork(work) if call.startswith(COMPLETED_BY_WAIT) else GlooWork(work)
            self.works = [one for one in self.works if one.failed or not one.is_completed()]
            self.works.append(work)
            if self._collected is not None:
                self._collected.append(work)
            return work

        return collecting

    def alltoall(self, outs: list[Any], ins: list[Any], options: Any) -> "GlooParts":
        """Of parts of any size, which gloo itself takes in one tensor only."""
        sizes = [[part.numel() for part in parts] for parts in (outs, ins)]
        space = torch.empty(sum(sizes[0]), dtype=ins[0].dtype)
        return GlooParts(self.alltoall_base(space, torch.cat(ins), *sizes, options), space, outs)

    def _start_coalescing(self, device: torch.device) -> None:
        self._collected = []

    def _end_coalescing(self, device: torch.device) -> "GlooBlock":
        works, self._collected = self._collected or [], None
        return GlooBlock(works)


class GlooParts:
    """An all-to-all of one tensor, which is cut once somebody waits for it."""

    def __init__(self, work: GlooWork, space: torch.Tensor, outs: list[torch.Tensor]) -> None:
        self._work, self._space, self._outs = work, space, outs

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> bool:
        self._work.wait()
        for out, part in zip(
            self._outs, torch.split(self._space, [out.numel() for out in self._outs]), strict=True
        ):
            out.copy_(part)
        return True


class GlooBlock:
    """All works of a coalesced block."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)


class GlooGroup:
    """Native gloo, which has no abort: what it holds is kept to the end of the process."""

    waits_on_host = True

    def __init__(self, calls: GlooCalls, graveyard: list[Any]) -> None:
        self.calls = calls
        self._graveyard = graveyard

    @property
    def failed(self) -> bool:
        return any(work.failed for work in self.calls.works)

    def connect(self) -> None:
        """Gloo has connected when it was made."""

    def mark(self) -> Any:
        """Return a mark that has passed: a caller of gloo has waited for it on the host."""
        return GlooBlock([])

    def apart(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """On the host one thing follows the other."""
        return nullcontext()

    def shrink(self, excluded: Sequence[int]) -> Inner:
        raise AssertionError("gloo cannot shrink")

    def abort(self) -> None:
        self._graveyard.append(self.calls)

    def close(self) -> None:
        self._graveyard.append(self.calls)


class GlooMaker:
    """Real groups on CPU tensors whose members meet in the LinkStore."""

    device_type = "cpu"
    combine = staticmethod(combine_in_a_loop)
    shrinks = False

    def __init__(self) -> None:
        self.made: list[str] = []
        self._graveyard: list[Any] = []

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        self.made.append(name)
        distributed: Any = dist
        prefixed = distributed.PrefixStore(name, store)
        gloo: Any = dist.ProcessGroupGloo
        backend = gloo(prefixed, rank, size, timedelta(seconds=30))
        calls = c10d_tables.wrap_backend(backend, prefixed, rank, size, kind="GLOO", device="cpu")
        return GlooGroup(GlooCalls(calls), self._graveyard)
