"""Counts the bytes that autograd keeps of a forward pass: what a micro-batch holds in flight.

On a GPU by what the allocator has handed out; on a CPU by the tensors that are saved for the
backward pass, each storage once, without those of the model itself.
"""

from itertools import chain

import torch


class HeldBytes:
    """One count, of the forward pass of ``model`` that is about to run in this thread."""

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
