"""A script whose layers go through DeepSpeed's own activation checkpointing."""

import argparse
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset


class Checkpointed(torch.nn.Module):
    """A layer of which only the input is kept for the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = deepspeed.checkpointing.checkpoint(self.layer, x)
        return output


def main() -> None:
    """Train ``--steps`` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    args, _ = parser.parse_known_args()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    model.blocks = torch.nn.ModuleList(map(Checkpointed, model.blocks))
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.deepspeed_config,
        training_data=TextDataset(None, 32),
    )
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    while engine.global_steps < args.steps:
        for batch in loader:
            engine.backward(engine(*batch))
            engine.step()
            if engine.global_steps == args.steps:
                break
    engine.destroy()


if __name__ == "__main__":
    main()
