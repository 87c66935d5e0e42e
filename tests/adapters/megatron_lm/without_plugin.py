"""Runs a script of Megatron-LM without the plugin: the records for a CPU, and torch's own gloo.

Without apex and transformer-engine Megatron-Core 0.16.1 cannot load the state of its optimizer: it
asks a fresh torch Adam for its step, and gives one tensor of it to all parameters, on which each of
them counts; and it wants a step beside the loaded tensors (core/optimizer/distrib_optimizer.py:
state_dict, load_state_dict, _set_main_param_and_optimizer_states). All three are mended.

With a seed in SUM_ORDER the same numbers are summed in another order: gradients, since the samples
of each round of micro-batches go to other replicas, and their norm. (Sums of bf16 gradients in
float32 are mostly exact, so it is the norm that makes the difference.)
"""

import functools
import os
import random
import runpy
import sys
from typing import Any

from elaswave_plugin.adapters.megatron_lm.triton_stub import without_triton
from tests.adapters.megatron_lm.save_peak import watch


def patch() -> None:
    """Patch what a machine without a GPU needs, and the wheel, which brings no Makefile."""
    without_triton()
    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
    from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
    from elaswave_plugin.adapters.megatron_lm.patches import lm_patches
    from elaswave_plugin.adapters.patching import PatchSet

    ours = lm_patches(Hooks(lambda config: None)).records
    built = [one for one in ours if one.target.endswith(":compile_helpers")]
    assert len(built) == 1
    PatchSet([*cpu_patches(scripts=True).records, *built]).apply()
    mend_loading()


def mend_loading() -> None:
    """A fresh Adam has counted no step, and a loaded one counts for each parameter by itself."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    mended: Any = DistributedOptimizer
    tell, load = mended.state_dict, mended.load_state_dict

    @functools.wraps(tell)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        for param in (param for group in inner.param_groups for param in group["params"]):
            if not inner.state[param]:
                moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[param] = {"step": torch.tensor(0.0), **moments}
        return tell(self)

    @functools.wraps(load)
    def load_state_dict(self: Any, loaded: Any) -> None:
        load(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    put = mended._set_main_param_and_optimizer_states

    @torch.no_grad()  # masters of float32 are views of the weights
    @functools.wraps(put)
    def with_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        put(self, param, {"step": state["step"], **tensors})

    mended.state_dict, mended.load_state_dict = state_dict, load_state_dict
    mended._set_main_param_and_optimizer_states = with_step


def sum_in_another_order(seed: int) -> None:
    """Sum gradients and their norm in an order of this seed."""
    import megatron.core.optimizer.optimizer as its_module
    import torch
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    of_samples, of_norm = random.Random(seed), torch.Generator().manual_seed(seed)
    sampler: Any = MegatronPretrainingSampler
    native = its_module.get_grad_norm_fp32

    def dealt(self: Any) -> tuple[int, int]:
        order = list(range(self.micro_batch_times_data_parallel_size // self.micro_batch_size))
        of_samples.shuffle(order)
        start = order[self.data_parallel_rank] * self.micro_batch_size
        return start, start + self.micro_batch_size

    def norm(grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> float:
        orders = [torch.randperm(grad.numel(), generator=of_norm) for grad in grads]
        shuffled = [grad.flatten()[one] for grad, one in zip(grads, orders, strict=True)]
        return native(shuffled, *args, **kwargs)

    sampler.get_start_end_idx = dealt
    its_module.get_grad_norm_fp32 = norm


if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    patch()
    if "SUM_ORDER" in os.environ:
        sum_in_another_order(int(os.environ["SUM_ORDER"]))
    if "WATCH_SAVES" in os.environ:
        watch()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
