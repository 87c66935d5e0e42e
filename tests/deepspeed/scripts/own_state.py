"""Scripts that change more than weights in a step; --mode says which, see test_own_state.py."""

import argparse
import copy
import json
import os
import random

import deepspeed
import numpy as np
import torch
from residual import WIDTH, Samples
from residual import Model as Residual
from torch import nn

import elaswave_plugin


class Model(nn.Module):
    """A perceptron with what the mode adds."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.body = Residual()
        self.norm = nn.BatchNorm1d(WIDTH) if mode == "statistics" else nn.Identity()
        if mode == "counts":
            self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        if "teacher" in mode:
            self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "counts":
            self.seen.add_(1)
        loss = self.body(self.norm(x)) * self.scale
        return loss + (loss - self.teacher(x)).square() if "teacher" in self.mode else loss


@torch.no_grad()
def follow(averages: nn.Module, model: nn.Module) -> None:
    """Move an average towards the weights."""
    for mean, weight in zip(averages.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(weight, 0.25)


@torch.no_grad()
def set_once(what: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Set weights, a rate or a buffer: what a script does once, by a variable of its own."""
    if what == "weights":
        for param in model.parameters():
            param.data.mul_(0.5)
    elif what == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
    else:
        model.scale.fill_(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args, _ = parser.parse_known_args()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    model = Model(args.mode)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=trained, training_data=Samples()
    )
    averages = model.teacher if "teacher" in args.mode else copy.deepcopy(model.body)
    last = {"step": 0}
    if "kept" in args.mode:
        elaswave_plugin.keep("averages", averages)
        elaswave_plugin.keep("last", last)
    has_set = False
    while engine.global_steps < args.steps:
        for batch in loader:
            if args.mode.endswith("once") and engine.global_steps >= 3 and not has_set:
                set_once(args.mode.split()[0], model, engine.optimizer)
                has_set = True
            scale = 1.0
            if args.mode == "draws":
                scale += (
                    0.1 * np.random.rand() + 0.1 * random.random() + 0.1 * torch.rand(()).item()
                )
            engine.backward(engine(batch) * scale)
            engine.step()
            if engine.global_steps != last["step"]:
                last["step"] = engine.global_steps
                if "teacher" in args.mode or "average" in args.mode:
                    follow(averages, model.body)
                if args.mode == "rates":
                    for group in engine.optimizer.param_groups:
                        group["lr"] = 1e-3 / engine.global_steps
                if args.mode == "clamps":
                    for param in model.parameters():
                        param.data.clamp_(-0.1, 0.1)
            if engine.global_steps == args.steps:
                break
    with open(f"state-{torch.distributed.get_rank()}.json", "w") as file:
        held = {**dict(averages.named_parameters()), **dict(model.named_buffers())}
        json.dump({name: value.double().tolist() for name, value in held.items()}, file)
    engine.destroy()


if __name__ == "__main__":
    main()
