"""The forward-backward function of a worker that runs more than its own replica.

Healthy steps go through Megatron-Core's own function, untouched. After a loss the same per
micro-batch steps run one contribution after the other (megatron/core/pipeline_parallel/
schedules.py, ``forward_backward_no_pipelining``), with the loss divided by the number of
micro-batches that a replica had at launch: in place, and so is a report that shares its storage.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from elaswave_plugin.adapters.megatron.compat.versions import backward_step
from elaswave_plugin.adapters.megatron.step.weight_gradients import fuses
from elaswave_plugin.adapters.megatron.sums.accumulators import GradAccumulators
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.errors import ConfigurationError

# What forward_backward_no_pipelining takes beside these must have its default value.
_CARRIED = ("forward_step_func", "data_iterator", "model", "seq_length", "micro_batch_size")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an argument that is not carried through a loss."""
    for name, value in arguments.items():
        # The length of decoders matters between stages, and models with one have none.
        if name not in (*_CARRIED, "decoder_seq_length") and value:
            raise ConfigurationError(
                f"forward_backward got {name}={value!r}, and elaswave_plugin carries only "
                f"{', '.join(_CARRIED)} and forward_only; leave it out"
            )


class ForwardPasses:
    """The forward passes of a call after a loss, one after the other."""

    def __init__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        replica_microbatches: int,
    ) -> None:
        """``data_iterator``, ``model``: as Megatron-Core takes them, each alone or in a list.

        ``replica_microbatches``: micro-batches of one logical replica, the divisor of mean losses.
        """
        self._step, self._replica_microbatches = forward_step_func, replica_microbatches
        (self._batches,), (self._model,) = map(_listed, (data_iterator, model))
        self._config = get_model_config(self._model)
        self.reports: list[Any] = []
        """The reported losses, one a micro-batch, in order of execution."""

    def run(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the next one; returns its loss and tokens. ``number``: in what is run in order."""
        return schedules.forward_step(
            self._step,
            self._batches,
            self._model,
            self._replica_microbatches,
            None,
            self.reports,
            self._config,
            parallel_state.get_context_parallel_world_size(),
            is_first_microbatch=not self.reports,
            current_microbatch=number,
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def run_contributions(
    passes: ForwardPasses,
    *,
    contributions: Sequence[Contribution],
    reduction: GradientReduction,
    model: DistributedDataParallel,
) -> None:
    """Run forward and backward of all ``contributions`` in order, then finalize the gradients.

    A contribution is sent off with its last micro-batch, and the next one has its memory. What is
    kept of a struck step is gone on from where it is, and others have memory beside it.
    """
    config, kept, apart = model.config, reduction.kept, reduction.keeps_contributions_apart
    num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
    whole = next((one for one in contributions[-1:] if one.whole), None)
    begun = kept.contribution if kept.earlier else next(iter(contributions), None)
    if apart:
        reduction.begin()
    if kept.earlier:
        num_tokens += sum(kept.tokens)
    elif apart:
        kept.begin(whole)
    with GradAccumulators(
        [model],
        in_place=None if whole is None else whole.microbatches[0],
        await_sent=reduction.await_sent,
        kept=None if begun is None else begun.microbatches[0],
        spare=kept.room,
    ) as accumulators:
        for contribution in contributions:
            first, last = contribution.microbatches[0], contribution.microbatches[-1]
            ships = apart and contribution is not whole
            missing = [one for one in contribution.microbatches if one not in kept.earlier]
            for order, microbatch in enumerate(missing):
                if apart and not order and fuses(config):
                    # What is added to in the backward is found in the forward.
                    accumulators.select(first)
                output, tokens = passes.run(order)
                num_tokens += tokens
                if apart and not order:
                    # What was added up before has left during the forward pass.
                    accumulators.select(first)
                leaves = ships and microbatch == last
                # Inside, no bucket is reduced.
                with (
                    model.no_sync(),
                    reduction.shipping(contribution) if leaves else nullcontext(),
                ):
                    backward_step(None, output, None, config)
            if ships and not missing:
                with reduction.shipping(contribution):
                    pass
            if ships:
                accumulators.release(first)
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            [model], num_tokens if config.calculate_per_token_loss else None
        )
