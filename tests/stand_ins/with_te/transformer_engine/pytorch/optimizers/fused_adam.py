"""Stands in for Transformer Engine's FusedAdam: its arguments, attributes, groups and state."""

import torch
from cpu_kernels import update


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose steps are counted once a group; versions before 2.20 leave empty groups out."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        assert adam_w_mode and bias_correction and not amsgrad, "no stand-in for that"
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, defaults | {"eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = 1
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self._scales = {}

    def load_state_dict(self, state_dict):
        """Copy what is loaded into the optimizer's own tensors."""
        super().load_state_dict(state_dict)
        for kept in self.state.values():
            kept.update({name: value.clone() for name, value in kept.items()})

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Update in place; moments that are there are used as they are."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                kept = self.state[param]
                if not kept:
                    kept["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    kept["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            update(group, [p for p in group["params"] if p.grad is not None], self.state)
