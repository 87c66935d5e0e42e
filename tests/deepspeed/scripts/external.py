"""A model that uses parameters outside of their modules, and makes a table in its first pass."""

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LAYERS, TIME = 64, 32, 2, 12


class Places(nn.Module):
    """A table of places as long as the longest input so far; ``late``: in a module of its own."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x.shape[1]
        if "table" not in self._buffers or self.table.shape[0] < time:
            angles = torch.outer(torch.arange(time), 1.0 / (1 + torch.arange(WIDTH)))
            self.register_buffer("table", angles.sin(), persistent=False)
        if self.late and not hasattr(self, "norm"):
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        return self.norm(x + self.table[:time]) if self.late else x + self.table[:time]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = Places(late)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.scale = nn.Linear(WIDTH, WIDTH)
        deepspeed.zero.register_external_parameter(self, self.scale.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.places(self.tokens(tokens[:, :-1]))
        for block in self.blocks:
            x = block(x)
        x = x + self.scale(x) @ self.scale.weight
        # Tied: the weight of a module whose own pass is over.
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (TIME + 1,), generator=draws)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args, _ = parser.parse_known_args()
    torch.manual_seed(0)
    model = Model(args.late)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Samples()
    )
    if args.evaluate:
        engine.eval()
        with torch.no_grad():
            print("evaluated:", float(engine(Samples()[0][None])))
        engine.train()
    while engine.global_steps < args.steps:
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == args.steps:
                break
    engine.destroy()


if __name__ == "__main__":
    main()
