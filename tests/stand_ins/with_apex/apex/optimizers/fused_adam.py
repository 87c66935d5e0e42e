"""Stands in for Apex's FusedAdam: its arguments, attributes, groups and state."""

import torch
from cpu_kernels import update


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose steps are counted once a group that is not empty."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        assert adam_w_mode and bias_correction and not amsgrad, "no stand-in for that"
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, defaults | {"eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = 1
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        # Walked beside the parameters in each step; None for each where there are no masters.
        self.param_groups_master = [
            {"params": [None] * len(group["params"])} for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Update in place as far as the list of masters goes, as the real one does."""
        for group, beside in zip(self.param_groups, self.param_groups_master, strict=False):
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            updated = []
            for param, _ in zip(group["params"], beside["params"], strict=False):
                if param.grad is None:
                    continue
                kept = self.state[param]
                if not kept:
                    kept["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    kept["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                updated.append(param)
            update(group, updated, self.state)
