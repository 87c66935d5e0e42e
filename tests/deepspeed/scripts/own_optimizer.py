"""A stock script without a line of the plugin: own optimizer and scheduler, loss not in the model.

It keeps its handles for the whole run, never destroys the engine, and writes at its end what they
say: one JSON object a worker, DIR/handles-RANK-PID.json.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import VOCABULARY_SIZE, TextDataset


class Head(torch.nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary], through one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY_SIZE, 32)
        self.hidden = torch.nn.Linear(32, 64)
        self.head = torch.nn.Linear(64, VOCABULARY_SIZE)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """A mapping, as many models return one."""
        return {"logits": self.head(torch.tanh(self.hidden(self.embedding(tokens))))}


def main() -> None:
    """Train for so many batches, whatever happens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--steps-scheduler", action="store_true")
    args, _ = parser.parse_known_args()
    torch.manual_seed(7)
    # As models come that were loaded: their script says when they train.
    model = Head().eval()
    groups = [
        {"params": model.embedding.parameters(), "lr": 1e-2, "weight_decay": 0.0},
        {"params": [*model.hidden.parameters(), *model.head.parameters()], "lr": 1e-3},
    ]
    inner = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 / (1 + step))
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=inner,
        lr_scheduler=None if args.steps_scheduler else scheduler,
        training_data=TextDataset(None, 16),
    )
    handles = [id(one) for one in (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler)]
    engine.train()
    seen = []
    trained = []
    while engine.global_steps < args.steps:
        for tokens, labels in loader:
            logits = engine(tokens)["logits"]
            trained.append(model.training)
            loss = F.cross_entropy(logits.view(-1, VOCABULARY_SIZE), labels.reshape(-1))
            engine.backward(loss)
            engine.step()
            if args.steps_scheduler:
                scheduler.step()
            seen.append((engine.global_steps, len(tokens), loss.item()))
            if engine.global_steps == args.steps:
                break
    kept = [id(one) for one in (optimizer, inner, scheduler)]
    rank = torch.distributed.get_rank()
    report = {
        "same_objects": handles == kept,
        "seen": seen,
        "always_trained": all(trained),
        "scheduler": scheduler.last_epoch,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
    }
    folder = Path(args.deepspeed_config).parent
    (folder / f"handles-{rank}-{os.getpid()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
