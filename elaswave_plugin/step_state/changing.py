"""The buffers of a model that passes of a step change, and the average of running statistics."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.step_state.step_state import copied
from elaswave_plugin.values.gathered import gathered

# What torch.nn.BatchNorm1d and its like have: averages over batches, and how many there were.
_AVERAGES, _COUNTS = ("running_mean", "running_var"), ("num_batches_tracked",)


class Changing:
    """Names of the buffers that passes change: whatever the first step has changed anywhere."""

    def __init__(self, *, why_not: Callable[[str], str | None]) -> None:
        """``why_not(name)``: why a buffer that passes change is not carried; None where it is."""
        self._why_not = why_not
        self._found: set[str] = set()
        self.names: tuple[str, ...] | None = None
        """None before the first step is complete."""

    @property
    def may_change(self) -> bool:
        """True if passes change any, or may, as is not known yet."""
        return self.names is None or bool(self.names)

    def know(self, names: tuple[str, ...] | None) -> None:
        """Have these names; None: the first step begins, again."""
        self.names, self._found = names, set()

    def check(
        self, values: Iterable[tuple[str, torch.Tensor]], before: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise ConfigurationError for a value that passes have changed and may not change.

        ``before``: those before the step.
        """
        for name, tensor in values:
            if name not in before or name in (self.names or ()):
                continue
            if torch.equal(copied(tensor), before[name]):
                continue
            why = self._why_not(name)
            if why is None and self.names is not None:
                why = "it did not in the first step, which says what is changed"
            if why is not None:
                raise ConfigurationError(
                    f"the forward pass changes the model's buffer {name!r}, which is not carried "
                    f"through a loss ({why}): use a layer without running statistics, or change it "
                    "between the steps, in the body of the loop"
                )
            self._found.add(name)

    def settle(self) -> tuple[str, ...]:
        """The passes of a step are done; returns what they may change (collective over WORLD)."""
        if self.names is None:
            everyone = gathered(sorted(self._found))
            self.names = tuple(sorted({name for names in everyone for name in names}))
        return self.names


def why_no_average(name: str) -> str | None:
    """Return why a buffer that passes change is not averaged; None for a running statistic."""
    if name.rpartition(".")[2] in (*_AVERAGES, *_COUNTS):
        return None
    return f"only {' and '.join(_AVERAGES)} are, which are averaged over the workers"


@torch.no_grad()
def average(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Average running statistics over WORLD in place, in rank order; counts are the largest."""
    for name in names:
        value = values[name].detach().clone()
        if name.rpartition(".")[2] in _COUNTS:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        values[name].copy_(value)
