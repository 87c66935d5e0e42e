"""The biases by which routers balance their experts: state that no optimizer has.

A router of a mixture of experts may add a bias to the score of each expert, which every step raises
or lowers by how many tokens all replicas have sent there (megatron/core/distributed/
finalize_model_grads.py, ``_update_router_expert_bias``). Every worker keeps those of all layers, so
that a worker that seals a step, or gets a layer of another stage, has them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter


class ExpertBiases:
    """Those of all layers, float32 of shape [layers, experts]; None where routers have none."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """As the model has them; collective over WORLD where routers have them."""
        self._chunks = chunks
        self.values: torch.Tensor | None = None
        config = chunks[0].config
        if config.num_moe_experts is not None and config.moe_router_enable_expert_bias:
            self.values = torch.zeros(config.num_layers, config.num_moe_experts)
            self.write(None)
            self.gather(is_placed=True)

    @torch.no_grad()
    def gather(self, *, is_placed: bool) -> None:
        """Have what all workers have in their layers; collective over WORLD, if there is anything.

        ``is_placed``: whether this worker has a part of the model.
        """
        if self.values is None:
            return
        table = torch.zeros_like(self.values, device=torch.cuda.current_device())
        everyone = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        # One worker of each stage tells, and a sum of integers keeps what zeros are added to.
        if is_placed and everyone.rank() == 0:
            for router in routers(self._chunks):
                table[router.layer_number - 1] = router.expert_bias
        dist.all_reduce(table.view(torch.int32))
        self.values = table.cpu()

    @torch.no_grad()
    def write(self, values: torch.Tensor | None) -> None:
        """Install ``values`` in the layers that are here; None: what they have.

        Counts of an interrupted step are dropped. They are float32 whatever the model is cast to:
        in 16 bits they depend on which worker has counted how many of the tokens.
        """
        if self.values is None:
            return
        for router in routers(self._chunks):
            router._maintain_float32_expert_bias()
            counts = router.local_tokens_per_expert
            router.local_tokens_per_expert = torch.zeros_like(counts, dtype=torch.float32)
            if values is not None:
                router.expert_bias.copy_(values[router.layer_number - 1])
        if values is not None:
            self.values = values

    @contextmanager
    def kept(self, *, as_begun: bool = False) -> Iterator[None]:
        """Undo what passes inside do to biases, counts and the table of losses for logs.

        ``as_begun``: inside, biases are those that the step's passes had; a schedule may have
        updated them.
        """
        before = [
            (one, one.expert_bias.clone(), one.local_tokens_per_expert.clone())
            for one in routers(self._chunks)
        ]
        # Versions that have no such table keep their losses elsewhere, for logs as well.
        table: dict[str, Any] = getattr(moe_utils, "get_moe_layer_wise_logging_tracker", dict)()
        logged = {name: entry["values"].clone() for name, entry in table.items()}
        for router, _, _ in before if as_begun else ():
            assert self.values is not None
            router.expert_bias.copy_(self.values[router.layer_number - 1])
        try:
            yield
        finally:
            for router, bias, counts in before:
                router.expert_bias.copy_(bias)
                router.local_tokens_per_expert.copy_(counts)
            for name, entry in table.items():
                entry["values"].copy_(logged.get(name, torch.zeros_like(entry["values"])))


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[TopKRouter]:
    """The routers with a bias."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return (one for one in modules if isinstance(one, TopKRouter) and one.expert_bias is not None)
