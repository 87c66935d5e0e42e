"""The losses of routers as the log shows them, summed alike whichever worker ran which micro-batch.

Megatron-Core adds them up by layer in one table of each worker, which the log sums over stages,
tensor parallel group and replicas (``track_moe_metrics`` in megatron/core/transformer/moe/
moe_utils.py). What a forward pass has added is taken out of that table and kept by micro-batch; the
log gets it back as the one table of the whole job, and groups of one to sum it over.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter

from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.values.plain import gathered

# By tp position and micro-batch: float32 of shape [layers].
Rows = dict[tuple[int, int], torch.Tensor]


class RouterLosses:
    """Those of the last step, by name: of a worker at first, of all workers once it is agreed."""

    def __init__(self, *, num_layers: int, num_replicas: int) -> None:
        """``num_layers``: of a mixture of experts; 0 for any other model."""
        self._num_layers = num_layers
        self.are_any = num_layers > 0
        self._num_replicas = num_replicas
        self._mine: dict[str, Rows] = {}
        # The names that are summed over the tp group and averaged over the replicas.
        self._averaged: set[str] = set()
        self._totals: dict[str, torch.Tensor] = {}

    def watch(self, module: torch.nn.Module) -> None:
        """Take what the routers in ``module`` add to Megatron-Core's table from now on."""
        for router in module.modules():
            if isinstance(router, TopKRouter):
                router.register_forward_hook(self._take)

    def begin(self) -> None:
        """A step begins, or begins again; what an interrupted pass has left in the table goes."""
        self._mine.clear()
        clear_aux_losses_tracker()

    def _take(self, router: Any, inputs: Any, output: Any) -> None:
        microbatch = rng.keyed_microbatch()
        if not torch.is_grad_enabled() or not router.training or microbatch is None:
            return
        place = parallel_state.get_tensor_model_parallel_rank(), microbatch
        for name, entry in get_moe_layer_wise_logging_tracker().items():
            row = self._mine.setdefault(name, {}).setdefault(place, torch.zeros(self._num_layers))
            row[router.layer_number - 1] = entry["values"][router.layer_number - 1].cpu()
            entry["values"].zero_()
            if entry["reduce_group"] is not None:
                self._averaged.add(name)

    def agree(self, num_microbatches: int) -> None:
        """Have those of all workers; collective over WORLD, at the end of a step."""
        if not self.are_any:
            return
        everyone = gathered((self._mine, self._averaged))
        rows: dict[str, Rows] = {}
        for theirs, averaged in everyone:
            self._averaged |= averaged
            for name, of_worker in theirs.items():
                known = rows.setdefault(name, {})
                for place, row in of_worker.items():
                    # Stages have layers of their own: all others of a row are 0. The proof of who
                    # has come runs a micro-batch twice, with the same result.
                    known[place] = torch.where(row == 0, known.get(place, row), row)
        self._totals = {
            name: self._total(name, of_name, num_microbatches)
            for name, of_name in sorted(rows.items())
        }

    def _total(self, name: str, rows: Mapping[tuple[int, int], torch.Tensor], count: int) -> Any:
        """As Megatron-Core sums it: each worker's at launch, then tp positions, then replicas."""
        positions = sorted({tp for tp, _ in rows})
        sums = []
        for replica in range(self._num_replicas):
            own = replica_microbatches(
                replica, num_replicas=self._num_replicas, num_microbatches=count
            )
            sums.append([_added([rows[tp, k] for k in own]) for tp in positions])
        if name not in self._averaged:
            # It shows what the last rank has.
            return sums[-1][-1]
        return _added([_added(of_replica) for of_replica in sums]) / self._num_replicas

    def fill_table(self) -> ProcessGroupCollection:
        """Have the table of the whole job where the log looks; the groups to sum it over."""
        alone = parallel_state.get_context_parallel_group()
        tracker = get_moe_layer_wise_logging_tracker()
        device = torch.cuda.current_device()
        for name, values in self._totals.items():
            tracker[name] = {
                "values": values.to(device, copy=True),
                "reduce_group": None,
                "avg_group": None,
                "reduce_group_has_dp": False,
            }
        groups = ProcessGroupCollection()
        groups.pp = groups.dp = alone
        return groups


def _added(terms: list[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, terms, torch.zeros_like(terms[0]))
