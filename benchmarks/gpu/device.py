"""The device that an item's program computes on: a GPU, or the CPU as its stand-in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a program computes on; `count`: GPUs, or as many as the CPU stands for."""

    is_stand_in: bool
    count: int

    @property
    def kind(self) -> str:
        """The device type of its tensors."""
        return "cpu" if self.is_stand_in else "cuda"

    def __str__(self) -> str:
        return "stand-in" if self.is_stand_in else self.kind

    def synchronize(self) -> None:
        """Wait until it has done all that it was given."""
        if not self.is_stand_in:
            import torch

            torch.cuda.synchronize()
