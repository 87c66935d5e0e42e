"""Yields the flat tensors of a shard as float32 pieces on the host, whichever device has them.

From a GPU they come over a stream of their own through two pinned pieces in turn: one is filled
while the other is read, beside what the training computes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PIECE_ELEMENTS = 1 << 20
Piece = npt.NDArray[np.float32]


class HostPieces:
    """The pieces of one worker's shard, seal after seal."""

    def __init__(self, *, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._elements = piece_elements
        # By device: a stream, and (pinned piece, event of its last copy) twice.
        self._lanes: dict[torch.device, tuple[Any, list[tuple[torch.Tensor, Any]]]] = {}

    def of(
        self, parts: Iterable[torch.Tensor], *, settled: Callable[[], None] = lambda: None
    ) -> Iterator[Piece]:
        """Yield the parts one after the other; a piece is valid until the next one is asked for.

        Whatever the calling thread's stream of a device has been given so far comes before, then
        ``settled()``, which may raise: by then it is known whether a collective before it was
        aborted. What the stream is given later does not wait, so no part may change until the last
        piece was read.
        """
        flat = [part.detach().reshape(-1) for part in parts]
        ready = [
            torch.cuda.current_stream(device).record_event()
            for device in {part.device for part in flat}
            if device.type != "cpu"
        ]
        return self._pieces(flat, ready, settled)

    def _pieces(
        self, parts: Iterable[torch.Tensor], ready: Iterable[Any], settled: Callable[[], None]
    ) -> Iterator[Piece]:
        for event in ready:
            event.synchronize()
            settled()
        for part in parts:
            if part.device.type == "cpu":
                for piece in torch.split(part, self._elements):
                    yield piece.float().numpy()
            else:
                yield from self._from_device(part)

    def _from_device(self, part: torch.Tensor) -> Iterator[Piece]:
        stream, lanes = self._lane(part.device)
        on_their_way: list[tuple[Piece, Any]] = []
        for number, piece in enumerate(torch.split(part, self._elements)):
            pinned, copied = lanes[number % 2]
            with torch.cuda.stream(stream):
                pinned[: piece.numel()].copy_(piece, non_blocking=True)
                copied.record(stream)
            on_their_way.append((pinned[: piece.numel()].numpy(), copied))
            if len(on_their_way) == len(lanes):
                yield self._arrived(on_their_way.pop(0))
        while on_their_way:
            yield self._arrived(on_their_way.pop(0))

    def _arrived(self, one: tuple[Piece, Any]) -> Piece:
        piece, copied = one
        copied.synchronize()
        return piece

    def _lane(self, device: torch.device) -> tuple[Any, list[tuple[torch.Tensor, Any]]]:
        if device not in self._lanes:
            cuda: Any = torch.cuda
            pieces = [torch.empty(self._elements, pin_memory=cuda.is_available()) for _ in range(2)]
            self._lanes[device] = cuda.Stream(device), [(piece, cuda.Event()) for piece in pieces]
        return self._lanes[device]
