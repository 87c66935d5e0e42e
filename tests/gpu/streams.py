"""A device that is not there: CUDA's names on a CPU, with a thread a stream and work done later.

Tensors say that they are on "cuda" and keep their bytes on the host. Each operation on them is put
on the current stream and returns; the stream's thread does it when it comes to it, after a pause,
so that a missing wait is seen as wrong bytes.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

LIMIT_S = 30.0
# Longer than whatever a host does between two calls, so that a missing wait is always seen: a host
# that has the processor, and one that waits for it.
PAUSE_S, LONG_PAUSE_S = 0.02, 0.5

aten = torch.ops.aten
READS_ON_HOST = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
WITHOUT_BYTES = (aten.new_empty.default, aten.empty_like.default)
COPIES = (aten._to_copy.default, aten.copy_.default)


class Event:
    """A place in a stream."""

    def __init__(self, **_: Any) -> None:
        self._reached = threading.Event()
        self._reached.set()  # of nothing, as CUDA has it

    def record(self, stream: "Stream | None" = None) -> None:
        reached = self._reached = threading.Event()
        (stream or current_stream()).put(reached.set, pause_s=0.0)

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self, stream: "Stream | None" = None) -> None:
        """The stream goes on behind it; the host does not wait."""
        reached = self._reached
        (stream or current_stream()).put(lambda: wait_for(reached), pause_s=0.0)

    def synchronize(self) -> None:
        wait_for(self._reached)


def wait_for(event: threading.Event) -> None:
    """Fails after the limit: no test waits for ever."""
    assert event.wait(LIMIT_S), f"a stream was not done after {LIMIT_S} s"


class Stream:
    """A thread that does what it is given, one after the other, each after a pause."""

    def __init__(self, **_: Any) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

    def put(self, work: Callable[[], None], *, pause_s: float | None = None) -> None:
        """Do it later."""

        def late() -> None:
            time.sleep(PAUSE_S if pause_s is None else pause_s)
            work()

        self._work.put(late)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing that is put on it inside is done before the end."""
        over = threading.Event()
        self.put(lambda: wait_for(over), pause_s=0.0)
        try:
            yield
        finally:
            over.set()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.record_event().synchronize()
        assert not self.errors, self.errors

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


class Cuda:
    """The names of torch.cuda: each thread is a worker with a default stream of its own."""

    def __init__(self) -> None:
        self.made: list[Stream] = []
        self.runtime = Runtime()
        self._of_thread = threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        """The one that this thread puts its work on."""
        return self._stack()[-1]

    def _stack(self) -> list[Stream]:
        if not hasattr(self._of_thread, "stack"):
            self._of_thread.stack = [self.make_stream()]
        stack: list[Stream] = self._of_thread.stack
        return stack

    def make_stream(self, *_: Any, **__: Any) -> Stream:
        self.made.append(Stream())
        return self.made[-1]

    @contextmanager
    def stream(self, one: Stream) -> Iterator[None]:
        """Put on it what runs inside."""
        self._stack().append(one)
        try:
            yield
        finally:
            self._stack().pop()

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams; raises what went wrong on them, as a device does."""
        for one in list(self.made):
            one.synchronize()

    def end(self) -> None:
        for one in self.made:
            one.end()


class Runtime:
    """CUDA's runtime as it pins: it knows what, and refuses what reaches beyond a limit."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.limit_bytes: float = float("inf")

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        assert not flags and not any(
            begin < address + length and address < begin + taken
            for begin, taken in self.pinned.items()
        )
        if sum(self.pinned.values()) + length > self.limit_bytes:
            return 2
        self.pinned[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


def current_stream() -> Any:
    """The current stream of torch.cuda, whatever stands there."""
    return torch.cuda.current_stream()


class LaterTensor(torch.Tensor):
    """One that says it is on a GPU: `host` has its bytes once the stream has come this far."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "LaterTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="cuda",
        )
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LaterTensor({self.host!r})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @property
    def data(self) -> "LaterTensor":  # type: ignore[override]
        return LaterTensor(self.host)

    def __getitem__(self, key: Any) -> "LaterTensor":
        """A view; torch's own asks for a driver first."""
        return LaterTensor(self.host[key])

    def record_stream(self, other: Any) -> None:
        """The host's memory is kept by what is queued."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def on_device(host: torch.Tensor) -> LaterTensor:
    """A tensor of the device with these bytes, there at once."""
    return LaterTensor(host.clone())


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Do views now, everything else on the current stream; what goes to the host waits for it."""
    bare_args = tree_map_only(LaterTensor, lambda one: one.host, args)
    bare = tree_map_only(LaterTensor, lambda one: one.host, kwargs)
    bare.pop("device", None)
    asynchronous = bare.pop("non_blocking", False)
    if func is aten.copy_.default and len(bare_args) == 3:
        asynchronous, bare_args = bare_args[2], bare_args[:2]
    now = current_stream()
    if func in READS_ON_HOST:
        now.synchronize()
        return func(*bare_args, **bare)
    if func.is_view or func in (aten.detach.default, aten.alias.default):
        return tree_map_only(torch.Tensor, LaterTensor, func(*bare_args, **bare))
    if func in COPIES:
        return _copy(func, args, kwargs, bare_args, bare, asynchronous)
    return _later(func, args, kwargs, bare_args, bare)


def _copy(func: Any, args: Any, kwargs: Any, bare_args: Any, bare: Any, asynchronous: bool) -> Any:
    """A copy within the device, to it, or to the host: for the last the host waits, if not asked
    otherwise."""
    if func is aten.copy_.default:
        target, source = bare_args
        to_host = not isinstance(args[0], LaterTensor)
        # From pageable memory CUDA takes the bytes before it returns.
        kept = source if isinstance(args[1], LaterTensor) else source.clone()
        current_stream().put(lambda: target.copy_(kept))
        answer = args[0]
    else:
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        target = torch.empty_like(bare_args[0], dtype=bare.get("dtype"))
        source = bare_args[0]
        current_stream().put(lambda: target.copy_(source))
        answer = target if to_host else LaterTensor(target)
    if to_host and not asynchronous:
        current_stream().synchronize()
    return answer


def _without_bytes(like: torch.Tensor) -> torch.Tensor:
    """New memory: what is in it is no number, so that nobody reads it without being seen."""
    made = torch.empty_like(like, device="cpu")
    return made.fill_(float("nan")) if made.is_floating_point() else made


def _later(func: Any, args: Any, kwargs: Any, bare_args: Any, bare: Any) -> Any:
    """An operation whose outputs have their shapes now and their bytes later."""
    shapes = tree_map_only(torch.Tensor, lambda one: one.to("meta"), (bare_args, bare))
    if func._schema.is_mutable:
        current_stream().put(lambda: func(*bare_args, **bare))
        return kwargs.get("out", args[0])
    meta = func(*shapes[0], **shapes[1])
    flat, _ = tree_flatten(meta)
    outs = [_without_bytes(one) for one in flat if isinstance(one, torch.Tensor)]

    def run() -> None:
        found, _ = tree_flatten(func(*bare_args, **bare))
        tensors: Sequence[torch.Tensor] = [one for one in found if isinstance(one, torch.Tensor)]
        for out, one in zip(outs, tensors, strict=True):
            out.copy_(one)

    if func not in WITHOUT_BYTES:
        current_stream().put(run)
    places = iter(outs)
    return tree_map_only(torch.Tensor, lambda _: LaterTensor(next(places)), meta)


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """CUDA's streams and events are these; all streams have ended when the block is over."""
    cuda = Cuda()
    for name, value in (
        ("Event", Event),
        ("Stream", cuda.make_stream),
        ("stream", cuda.stream),
        ("current_stream", cuda.current_stream),
        ("synchronize", cuda.synchronize),
        ("cudart", lambda: cuda.runtime),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    try:
        yield cuda
    finally:
        cuda.end()
