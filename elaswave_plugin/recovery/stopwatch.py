"""Times passes through parts of the model: on a CPU, and on a GPU by events of its stream.

Reading an event that has not happened would stop the host until it has: events are read at the end
of a later step, when they have. On a CPU also what a step takes beside the passes. And, once, what
a sample holds in these parts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from elaswave_plugin.core.planner.layer_times import (
    BACKWARD,
    FORWARD,
    INPUTS,
    LAYER,
    SUM,
    PassTimes,
)
from elaswave_plugin.recovery.clocks import Clocks


class HeldBytes:
    """The bytes that autograd keeps of a forward pass of ``model``, about to run in this thread.

    On a GPU by what the allocator has handed out; on a CPU by the tensors that are saved for the
    backward pass, each storage once, without those of the model itself.
    """

    def __init__(self, model: torch.nn.Module, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._bytes = 0
        self._taken = torch.cuda.memory_allocated() if on_gpu else 0
        own = chain(model.parameters(), model.buffers())
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        if not on_gpu:
            self._hooks.__enter__()

    def take(self) -> int:
        """Return the bytes that have come to be held since the last call."""
        now = torch.cuda.memory_allocated() if self._on_gpu else self._bytes
        taken, self._taken = max(0, now - self._taken), now
        return taken

    def close(self) -> None:
        """The pass is over, or was interrupted."""
        if not self._on_gpu:
            self._hooks.__exit__()

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # What was saved lives on, so that no other storage comes to lie at its place.
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
        return tensor


# A point in time: seconds of the clock, or an event of the device's stream.
Mark = Any


class Operations:
    """One worker's operations of a step: a forward or a backward of a micro-batch each.

    What lies between two of them and is no waiting belongs to all of them alike; what lies before
    the first and behind the last, the update and the snapshot, comes once a step.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        """``waited()``: seconds that this worker has waited for others so far."""
        self._waited = waited
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing has run yet."""
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        # When the last operation ended, and how long had been waited by then.
        self._left: tuple[float, float] | None = None
        self._between_s, self._count = 0.0, 0

    def enter(self) -> None:
        """An operation begins."""
        now_s = time.perf_counter()
        if self._left is not None:
            left_s, waited_s = self._left
            self._between_s += now_s - left_s - (self._waited() - waited_s)
            self._count += 1
            self._left = None
        elif self._first_s is None:
            self._first_s = now_s

    def leave(self) -> None:
        """It ends."""
        self._left = time.perf_counter(), self._waited()

    def seconds(self) -> tuple[float, float] | None:
        """(of each operation, around all of them) in this step; None where it had less than two."""
        if self._first_s is None or self._left is None or not self._count:
            return None
        around_s = time.perf_counter() - self._began_s - (self._left[0] - self._first_s)
        # Another thread's waiting counts too, and may be longer than what it is taken from.
        return max(0.0, self._between_s / self._count), max(0.0, around_s)


class Stopwatch:
    """Tells `PassTimes` of passes, as soon as it is known how long they took."""

    def __init__(
        self,
        times: PassTimes,
        *,
        on_gpu: bool = False,
        waited: Callable[[], float] = lambda: 0.0,
        is_followed: Callable[[], bool] = lambda: False,
    ) -> None:
        """``on_gpu``: whether the passes run there; ``clocks``: those of what they run on.

        ``waited()``: seconds that this worker has waited for others so far.
        ``is_followed()``: whether optimizer state is on its way to it.
        ``is_split``: whether layers leave the weight gradients out of their backward passes.
        """
        self.clocks = Clocks()
        self.operations = Operations(waited)
        self.is_split = False
        self._is_followed = is_followed
        self._waited, self._sum_s = waited, 0.0
        self.times = times
        self.on_gpu = on_gpu
        self._open: deque[tuple[str, str, Mark, Mark, float, int, bool]] = deque()
        self._held: HeldBytes | None = None

    def mark(self) -> Mark:
        """This moment of the work."""
        if not self.on_gpu:
            return time.perf_counter()
        new_event: Any = torch.cuda.Event
        event = new_event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str, which: str, first: Mark, *, count: int = 1, tokens: int = 0) -> Mark:
        """A pass of ``tokens`` through ``count`` like parts, that began at ``first``, ends here."""
        last = self.mark()
        if self.is_split and (part, which) == (LAYER, BACKWARD):
            which = INPUTS
        # What counts is what it would have taken at clock 1.
        scale = self.clocks.clock / count
        followed = self._is_followed()
        if self.on_gpu:
            self._open.append((part, which, first, last, scale, tokens, followed))
            return last
        self.clocks.stretch(last - first)
        last = self.mark()
        self.times.note(part, which, scale * (last - first), tokens=tokens, followed=followed)
        return last

    def lap_whole(self, first: Mark, *, samples: int, tokens: int) -> None:
        """A forward pass through the whole model, whose layers are not known, ends here."""
        self.lap(LAYER, FORWARD, first, count=samples, tokens=tokens)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Gradients of the step are summed in this block, in which waiting does not count."""
        began_s, waited_s = time.perf_counter(), self._waited()
        yield
        self._sum_s += time.perf_counter() - began_s - (self._waited() - waited_s)

    def begin_holding(self, model: torch.nn.Module, parts: Sequence[str]) -> None:
        """A forward pass of ``model`` begins: count what it holds where that is not known."""
        self.end_holding()
        if self.times.lacks_held(parts):
            self._held = HeldBytes(model, on_gpu=self.on_gpu)

    def holds(self, part: str, *, count: int) -> None:
        """Note what a forward pass through a part holds; ``count``: samples and like parts."""
        if self._held is not None:
            self.times.note_held(part, self._held.take() / count)

    def end_holding(self) -> None:
        """The forward pass is over."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def step_over(self) -> None:
        """A step is complete: count it, and what has become known of the one before."""
        beside = self.operations.seconds()
        if beside is not None and not self.on_gpu:
            self.times.note_beside(*beside)
        while self._open and self._open[0][3].query():
            part, which, first, last, scale, tokens, followed = self._open.popleft()
            seconds = scale * 1e-3 * first.elapsed_time(last)
            self.times.note(part, which, seconds, tokens=tokens, followed=followed)
        if self._sum_s and not self.on_gpu:
            self.times.note(SUM, SUM, self._sum_s)
        self._sum_s = 0.0
        self.times.step_over()

    def drop_step(self) -> None:
        """The step was interrupted; events of an aborted stream may never happen."""
        self.end_holding()
        self._open.clear()
        self._sum_s = 0.0
        self.times.drop_step()
