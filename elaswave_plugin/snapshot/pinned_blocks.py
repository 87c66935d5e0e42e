"""Pins the memory of a snapshot for a GPU, block by block as it is used.

A GPU copies to pinned memory itself, at the speed of its bus, while the host's processors compute.
"""

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from elaswave_plugin.snapshot.host_copies import PIECE_ELEMENTS

# A copy may not cross from one block to the next.
BLOCK_BYTES = 16 * 4 * PIECE_ELEMENTS


class PinnedBlocks:
    """The blocks of one buffer; once CUDA refuses one, what is not pinned is copied more slowly."""

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
