"""A script that trains low-rank adapters beside the layers of a model, whose weights are frozen.

--cut: deepspeed.zero.Init cuts the model when it is built; --follow: the loop moves a frozen
weight. At the end each worker writes frozen-PID.json: a digest of each frozen weight, whole.
"""

import argparse
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from torch import nn

import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset

RANK = 4


class Adapted(nn.Module):
    """A linear layer, and beside it one of low rank, which alone is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: GPT) -> GPT:
    """Freeze a model, and give its attention layers adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.projection = Adapted(block.qkv), Adapted(block.projection)
    return model


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--follow", action="store_true")
    args, _ = parser.parse_known_args()
    config = json.loads(Path(args.deepspeed_config).read_text())
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    if args.cut:
        deepspeed.init_distributed()
    torch.manual_seed(1234)
    with deepspeed.zero.Init(config_dict_or_path=config) if args.cut else nullcontext():
        model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    model = adapt(model)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config=args.deepspeed_config,
        training_data=TextDataset(None, 32, 40),
    )
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}

    def digests() -> dict[str, str]:
        found = {}
        for name, param in frozen.items():
            with deepspeed.zero.GatheredParameters([param]):
                data = param.detach().float().numpy().tobytes()
            found[name] = hashlib.sha256(data).hexdigest()
        return found

    while engine.global_steps < args.steps:
        for batch in loader:
            engine.backward(engine(*batch))
            engine.step()
            if args.follow:
                weight = frozen["head.weight"]
                with torch.no_grad():
                    getattr(weight, "ds_tensor", weight).data.mul_(0.5)
            if engine.global_steps == args.steps:
                break
    seen = elaswave_plugin.deepspeed.run(engine, digests)
    Path(args.deepspeed_config).with_name(f"frozen-{os.getpid()}.json").write_text(json.dumps(seen))
    engine.destroy()


if __name__ == "__main__":
    main()
