"""A stock script that trains a small GPT with DeepSpeed's PipelineModule; no line of the plugin."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import RepeatingLoader
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import VOCABULARY_SIZE, Block, TextDataset


class Scale(nn.Module):
    """Times a number that is a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Embedding(nn.Module):
    """Tokens [batch, time] to [batch, time, hidden]."""

    def __init__(self, hidden: int, length: int, table: bool = False) -> None:
        """``table``: the places of tokens are a table that the first pass makes."""
        super().__init__()
        self.scaled = Scale(0.5) if table else None
        self.tokens = nn.Embedding(VOCABULARY_SIZE, hidden)
        self.positions = nn.Embedding(length, hidden)

    @property
    def weight(self) -> torch.Tensor:
        return self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places)
        if self.scaled is None:
            return x
        if "table" not in self._buffers:
            self.register_buffer("table", places.sin()[:, None], persistent=False)
        return x + self.scaled(self.table)


class Head(nn.Module):
    """The logits [batch, time, vocabulary]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def logits_of(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCABULARY_SIZE), labels.reshape(-1))


def layers_of(args: argparse.Namespace) -> list[LayerSpec]:
    hidden, length = args.hidden_size, args.seq_length
    embedding, head = LayerSpec(Embedding, hidden, length, args.table), LayerSpec(Head, hidden)
    if args.tied:
        tied = partial(TiedLayerSpec, "embedding", Embedding, hidden, length)
        embedding, head = tied(), tied(forward_fn=logits_of)
    blocks = [
        LayerSpec(Block, hidden, 4, args.dropout or 0.1 * args.seed_layers)
        for _ in range(args.num_layers)
    ]
    return [embedding, *blocks, head]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ExponentialLR:
    """It goes by the rate of the step before."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def seed_with(number: int) -> None:
    # DeepSpeed's own function fails here: it gets one of numpy's integers.
    torch.manual_seed(int(number))


def evaluated(engine: deepspeed.PipelineEngine, data: TextDataset | None, args: Any) -> float:
    """The loss over the data, of which a stage in the middle has none."""

    def work() -> float:
        batches = None if data is None else iter(torch.utils.data.DataLoader(data, batch_size=2))
        found = engine.eval_batch(batches, return_logits=args.with_logits)
        loss, _ = found if args.with_logits else (found, None)
        return float(loss)

    if not args.guarded:
        return work()
    from elaswave_plugin.deepspeed import run

    return run(engine, work)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--seed-layers", action="store_true")
    parser.add_argument("--data-iter", action="store_true")
    parser.add_argument("--own-loader", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--save-at", type=int, default=None)
    parser.add_argument("--evaluate-at", type=int, nargs="*", default=())
    parser.add_argument("--with-logits", action="store_true")
    parser.add_argument("--halving", action="store_true")
    parser.add_argument("--guarded", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--counted", action="store_true")
    parser.add_argument("--agree", action="store_true")
    parser.add_argument("--late-steps", type=int, default=None)
    parser.add_argument("--load", default=None)
    args, _ = parser.parse_known_args()
    return args


def main() -> None:
    """Train, and leave what the script saw."""
    args = parse_arguments()
    came_later = int(os.environ.get("ELASWAVE_INCARNATION", "0"))
    if came_later and args.late_steps:
        args.steps = args.late_steps
    deepspeed.init_distributed()
    # Who comes later draws other weights, which it must not use.
    torch.manual_seed(1234 + came_later)
    module = PipelineModule(
        layers_of(args),
        num_stages=args.stages,
        loss_fn=mean_loss,
        seed_layers=args.seed_layers,
        seed_fn=seed_with,
        activation_checkpoint_interval=int(args.recompute),
    )
    if args.frozen:
        for block in (layer for layer in module.forward_funcs if isinstance(layer, Block)):
            block.up.weight.requires_grad = False
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=args.deepspeed_config,
        lr_scheduler=halving if args.halving else None,
        training_data=TextDataset(None, args.seq_length, args.limit),
    )
    folder = Path(args.deepspeed_config).parent
    if args.load:
        engine.load_checkpoint(args.load)
    held_out = TextDataset(None, args.seq_length, 16)
    batches = iter(RepeatingLoader(loader)) if args.data_iter else None
    if args.own_loader:
        batches = iter(torch.utils.data.DataLoader(held_out, batch_size=2))
    seen, evaluations = [], []
    while (len(seen) if args.counted else engine.global_steps) < args.steps:
        if engine.global_steps in args.evaluate_at:
            # Every pipeline has the same batches.
            reads = engine.is_first_stage() or engine.is_last_stage()
            evaluations.append(evaluated(engine, held_out if reads else None, args))
        if engine.global_steps == args.save_at:
            engine.save_checkpoint(str(folder / "checkpoints"))
        loss = engine.train_batch(data_iter=batches)
        if args.agree:
            # A collective of the script's own.
            torch.distributed.broadcast(loss, src=0)
        seen.append((engine.global_steps, engine.global_samples, float(loss)))
    told = {
        "seen": seen,
        "evaluations": evaluations,
        "lr": engine.get_lr(),
        "same_objects": engine.optimizer is optimizer and engine.lr_scheduler is scheduler,
    }
    (folder / f"seen-{os.getpid()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
