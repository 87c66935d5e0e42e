"""What a worker keeps of each part of the model, and how much memory it has for a plan."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state, and of all that a worker may hold.

    ``units``: elements of each part of the model, as in `GridSeating`: layers by number from 1,
    what is in front of them below, what follows them above. Of each element a worker keeps
    ``weight_bytes`` and ``gradient_bytes``; its stage's workers share ``optimizer_bytes`` out.
    """

    units: Mapping[int, int]
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    limit_bytes: float = float("inf")

    def elements(self, num_layers: int) -> list[int]:
        """Of what is in front of the layers, of each layer, and of what follows them."""
        front = sum(length for unit, length in self.units.items() if unit < 1)
        behind = sum(length for unit, length in self.units.items() if unit > num_layers)
        return [front, *(self.units.get(number + 1, 0) for number in range(num_layers)), behind]
