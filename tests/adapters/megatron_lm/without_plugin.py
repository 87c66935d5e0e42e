"""Runs a script of Megatron-LM without the plugin: the records for a CPU, and torch's own gloo.

Without apex and transformer-engine Megatron-Core 0.16.1 cannot load the state of its optimizer: it
asks a fresh torch Adam for its step, and gives one tensor of it to all parameters, on which each of
them counts; and it wants a step beside the loaded tensors (core/optimizer/distrib_optimizer.py:
state_dict, load_state_dict, _set_main_param_and_optimizer_states). All three are mended.
"""

import functools
import runpy
import sys
from typing import Any

from elaswave_plugin.adapters.megatron_lm.triton_stub import without_triton


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


if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    patch()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
