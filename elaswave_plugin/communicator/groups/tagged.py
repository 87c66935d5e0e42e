"""Messages by tag between two members of a group: over the links, whatever carries its collectives.

A pipeline with unequal stages, and contributions to gradients, are sent as they become ready and
taken as they are needed, in orders that differ at the two ends. NCCL knows no tags: it pairs what
two workers send and take by order alone, and a receive that comes first holds up what follows it.
"""

from __future__ import annotations

from typing import Any

import torch

from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.groups.work import ElasticWork


class Arriving:
    """A message on its way to ``target``, which has it once ``wait`` returns."""

    def __init__(self, work: ElasticWork, space: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._space, self._target = work, space, target

    def wait(self) -> torch.Tensor:
        """The target. Raises EpochChanged, LinkError."""
        self._work.wait()
        if self._space is not self._target:
            self._target.copy_(self._space)
        return self._target


def send(tensor: torch.Tensor, group: Any, *, rank: int, tag: int) -> ElasticWork:
    """Send to a rank of an elastic group; done when the bytes have left or been copied."""
    return ElasticProcessGroup.send(group, [tensor], rank, tag)


def receive(target: torch.Tensor, group: Any, *, rank: int, tag: int) -> Arriving:
    """Have a rank's tensor of the same shape and dtype in ``target``.

    What is for a device waits in host memory: the links' one thread may not wait for a stream,
    which itself may wait for workers that wait for these links.
    """
    space = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    return Arriving(ElasticProcessGroup.recv(group, [space], rank, tag), space, target)
