"""Copies the flat tensors of a shard to the host as float32, whichever device has them.

From a GPU they come over a stream of their own, beside what the training computes, straight to
where they belong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

PIECE_ELEMENTS = 1 << 20
Floats = npt.NDArray[np.float32]
# Fills an array from its begin on, and yields the elements that are in place.
Copy = Callable[[Floats], Iterator[int]]


class HostCopies:
    """The copies of one worker's shard, seal after seal."""

    def __init__(self, *, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._elements = piece_elements
        self._streams: dict[torch.device, Any] = {}

    def of(
        self, parts: Sequence[torch.Tensor], *, settled: Callable[[], None] = lambda: None
    ) -> Copy:
        """Return what copies the parts, one after the other.

        Whatever the calling thread's stream of a device has been given so far comes before, then
        ``settled()``, which may raise: by then it is known whether a collective before it was
        aborted. What the stream is given later does not wait, so no part may change until all of
        them are in place.
        """
        flat = [part.detach().reshape(-1) for part in parts]
        devices = {part.device for part in flat if part.device.type != "cpu"}
        ready = [torch.cuda.current_stream(device).record_event() for device in devices]
        return partial(self._copy, flat, ready, settled)

    def _copy(
        self,
        parts: Sequence[torch.Tensor],
        ready: Sequence[Any],
        settled: Callable[[], None],
        target: Floats,
    ) -> Iterator[int]:
        for event in ready:
            event.synchronize()
            settled()
        first = 0
        for part in parts:
            copy = self._from_host if part.device.type == "cpu" else self._from_device
            yield from copy(part, target, first)
            first += part.numel()

    def _from_host(self, part: torch.Tensor, target: Floats, first: int) -> Iterator[int]:
        for begin, end in self._cuts(first, first + part.numel()):
            target[begin:end] = np.from_dlpack(part[begin - first : end - first].float())
            yield end

    def _from_device(self, part: torch.Tensor, target: Floats, first: int) -> Iterator[int]:
        cuda = cast(Any, torch.cuda)
        stream, host = self._stream(part.device), torch.from_numpy(target)
        on_their_way = []
        for begin, end in self._cuts(first, first + part.numel()):
            with cuda.stream(stream):
                host[begin:end].copy_(part[begin - first : end - first], non_blocking=True)
                # Waiting for it takes no processor.
                copied = cuda.Event(blocking=True)
                copied.record(stream)
            on_their_way.append((end, copied))
        for end, copied in on_their_way:
            copied.synchronize()
            yield end

    def _cuts(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut [first, last) at multiples of a piece in the target, which pinned blocks are."""
        while first < last:
            end = min(last, (first // self._elements + 1) * self._elements)
            yield first, end
            first = end

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = cast(Any, torch.cuda).Stream(device)
        return self._streams[device]


# A copy may not cross from one block to the next.
BLOCK_BYTES = 16 * 4 * PIECE_ELEMENTS


class PinnedBlocks:
    """The memory of one snapshot, pinned for a GPU block by block as it is used.

    A GPU copies to pinned memory itself, at the speed of its bus, while the host's processors
    compute. Once CUDA refuses a block, what is not pinned is copied more slowly.
    """

    def __init__(self, memory: memoryview) -> None:
        self._address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        # Where the blocks that are pinned end, all but the last one at a multiple of a block.
        self._ends = [0]
        self.refused = ""
        """The words in which CUDA refused to pin more."""

    def pin(self, used_bytes: int) -> None:
        """Have at least the first bytes pinned, and no page behind them that was not."""
        if self._ends[-1] < used_bytes and self._ends[-1] % BLOCK_BYTES:
            self._unpin_last()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._ends[-1] < used_bytes and not self.refused:
            begin = self._ends[-1]
            end = min(begin + BLOCK_BYTES, used_bytes)
            error = runtime.cudaHostRegister(self._address + begin, end - begin, 0)
            if int(error):
                self.refused = str(runtime.cudaGetErrorString(error))
                _take_error()
            else:
                self._ends.append(end)

    def free(self, used_bytes: int) -> None:
        """Let go of what reaches beyond the first bytes: its memory is given back."""
        while self._ends[-1] > used_bytes:
            self._unpin_last()

    def _unpin_last(self) -> None:
        self._ends.pop()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(self._address + self._ends[-1])


def _take_error() -> None:
    """CUDA reports the last error of a thread again behind its next kernel: have that here.

    An error of the device itself would be reported again and again.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
