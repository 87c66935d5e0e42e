"""The losses that a forward step reports, summed alike whichever worker ran which micro-batch."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.megatron.microbatches import Microbatches
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import gathered

Report = Mapping[str, torch.Tensor]


class LossTotals:
    """Adds the reports of a batch up in one order: each replica's, then replica by replica.

    Megatron-LM adds a worker's reports and all-reduces the sums over its data-parallel group
    (megatron/training/training.py, ``train_step`` and ``evaluate``). It gets one report a worker
    here, whose sum over any such group is the total: the first worker's holds it, the others' 0.
    A loss that is reported as one number counts as one a micro-batch, and is not summed over
    groups there: everyone holds its mean.
    """

    def __init__(self, microbatches: Microbatches, *, num_replicas: int) -> None:
        self._microbatches = microbatches
        self._num_replicas = num_replicas
        # Of the last batch: each mean, and what the first one was counted over.
        self.means: dict[str, torch.Tensor] = {}
        self.count = 0
        # By rank, where they are known.
        self.paces: dict[int, tuple[float, int]] = {}

    @property
    def loss(self) -> float:
        """The first mean."""
        return float(next(iter(self.means.values())))

    def agree(
        self,
        reports: Sequence[Report],
        group: dist.ProcessGroup,
        *,
        pace: tuple[float, int] | None = None,
        by_microbatch: bool = False,
    ) -> list[Report]:
        """The reports that Megatron-LM is to see; collective over WORLD, which tells all paces.

        ``by_microbatch``: whether each micro-batch counts alike, however many tokens it has; as
        evaluations with --sft have it, which average what workers report.
        Raises ConfigurationError for a report that is neither a mean nor a pair of sum and count.
        """
        mine: dict[int, dict[str, list[float]]] = {}
        if self._microbatches.reports_losses:
            pairs = zip(self._microbatches.reports, reports, strict=True)
            mine = {k: {name: _numbers(name, v) for name, v in r.items()} for k, r in pairs}
        everyone = gathered((mine, pace))
        rows = {k: row for rows, _ in everyone for k, row in rows.items()}
        averaged = {name for name, v in rows[0].items() if by_microbatch and len(v) == 2}
        for row in rows.values():
            row |= {name: _mean(*row[name]) for name in averaged}
        self.paces = {rank: one for rank, (_, one) in enumerate(everyone) if one is not None}
        totals = {name: self._total([rows[k][name] for k in sorted(rows)]) for name in rows[0]}
        count = len(rows)
        self.means = {
            name: total[0] / (total[1] if total.numel() == 2 else count)
            for name, total in totals.items()
        }
        first = next(iter(totals.values()))
        # Tokens, where they are reported.
        self.count = int(first[1]) if first.numel() == 2 else 0
        holds = group.rank() == 0
        held = {name: self._held(name, total, holds=holds) for name, total in totals.items()}
        return [held | {name: _averaged(self.means[name], group) for name in averaged}]

    def _held(self, name: str, total: torch.Tensor, *, holds: bool) -> torch.Tensor:
        if total.numel() == 1:
            return self.means[name].view(1)
        return total if holds else torch.zeros_like(total)

    def _total(self, rows: Sequence[Sequence[float]]) -> torch.Tensor:
        device = torch.cuda.current_device()
        replicas = (
            replica_microbatches(one, num_replicas=self._num_replicas, num_microbatches=len(rows))
            for one in range(self._num_replicas)
        )
        return reduce(
            torch.add,
            (
                torch.tensor([rows[k] for k in own], dtype=torch.float32, device=device).sum(dim=0)
                for own in replicas
            ),
        )


def told_everyone(losses: Report) -> Report:
    """Give the losses of an evaluation to all stages (collective over WORLD)."""
    everyone = gathered({name: float(loss) for name, loss in losses.items()})
    known: dict[str, float] = next(filter(None, everyone), {})
    return losses or {name: torch.tensor(loss) for name, loss in known.items()}


def _mean(total: float, count: float) -> list[float]:
    """Return the mean of a micro-batch in float32, as Megatron-LM computes it."""
    of_total, of_count = torch.tensor([total, count], dtype=torch.float32)
    return [float(of_total / of_count)]


def _averaged(mean: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a report whose average over a group is ``mean``, to the bit.

    In float64, where a float32 times a number of workers, and that divided by it, are exact.
    """
    share = mean.double() * (group.size() if group.rank() == 0 else 0)
    return torch.stack([share, torch.ones_like(share)])


def _numbers(name: str, value: Any) -> list[float]:
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.numel() not in (1, 2):
        shown = f"{value.numel()} numbers" if is_tensor else f"a {type(value).__name__}"
        raise ConfigurationError(
            f"the forward step reports {name!r} as {shown}, wanted a tensor of one, or of two: its"
            " sum and the number of tokens, as pretrain_gpt.py reports them"
        )
    return [float(one) for one in value.view(-1).tolist()]
