"""Train a small GPT on text with DeepSpeed: an ordinary script, with no line of elaswave_plugin."""

import argparse
import os
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY_SIZE = 256


def parse_arguments() -> argparse.Namespace:
    """Arguments of the model and the data; those of the training are in the configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed's JSON configuration")
    parser.add_argument("--text", default=None, help="file, or folder with Python files")
    parser.add_argument("--limit", type=int, default=None, help="most samples to use")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


class Block(nn.Module):
    """A transformer layer: causal attention and a two-layer perceptron, both residual."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, hidden] to the same shape."""
        batch, time, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, time, hidden)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A byte-level language model; its forward pass returns the mean loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        self.blocks = nn.ModuleList(
            Block(args.hidden_size, args.num_attention_heads, args.dropout)
            for _ in range(args.num_layers)
        )
        self.norm = nn.LayerNorm(args.hidden_size)
        self.head = nn.Linear(args.hidden_size, VOCABULARY_SIZE)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the labels [batch, time] after the tokens [batch, time]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY_SIZE), labels.reshape(-1))


class TextDataset(torch.utils.data.Dataset):
    """Consecutive windows of a text, one token a byte: (tokens, labels), each [time].

    Files are joined by a zero byte; ``limit``: windows that are taken from the front.
    """

    def __init__(self, path: str | None, seq_length: int, limit: int | None = None) -> None:
        root = Path(path or Path(sysconfig.get_path("stdlib")) / "json")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*.py"))
        text = b"\0".join(file.read_bytes() for file in files)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq_length = seq_length
        self.length = min(limit or len(text), (len(text) - 1) // seq_length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = index * self.seq_length
        window = self.tokens[first : first + self.seq_length + 1].long()
        return window[:-1], window[1:]


def main() -> None:
    """Train until the engine has made ``--steps`` steps."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = GPT(args)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=TextDataset(args.text, args.seq_length, args.limit),
    )
    while engine.global_steps < args.steps:
        for tokens, labels in loader:
            step = engine.global_steps
            loss = engine(tokens.to(engine.device), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_steps > step and torch.distributed.get_rank() == 0:
                print(f"step {step:4d} | loss {loss.item():.6f} | lr {engine.get_lr()[0]:.2e}")
            if engine.global_steps == args.steps:
                break
    engine.destroy()


if __name__ == "__main__":
    main()
