"""A model with a layer whose output for a sample depends on the others of its batch."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from hf_trainer import collate
from train_accelerate import build_model
from train_deepspeed import TextDataset
from transformers import Trainer, TrainingArguments, set_seed

LENGTH, WIDTH = 32, 64


class Capacity(torch.nn.Module):
    """The places of a batch whose first value is largest pass a layer more, as with experts."""

    def __init__(self, *, where_trained: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.where_trained = where_trained

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [samples, places, values]; half of the places."""
        if self.where_trained and not self.training:
            return hidden + self.layer(hidden)
        largest = hidden[..., 0] >= hidden[..., 0].median()
        return hidden + self.layer(hidden) * largest[..., None]


def layer_of(kind: str) -> torch.nn.Module:
    """Return the layer, of [samples, places, values]."""
    if kind == "capacity":
        return Capacity(where_trained=False)
    if kind == "capacity where trained":
        return Capacity(where_trained=True)
    # A place of a text is a channel here.
    norm = torch.nn.BatchNorm1d(LENGTH, track_running_stats=kind != "without statistics")
    return norm.eval() if kind == "frozen" else norm


class KeptFrozen(torch.nn.Module):
    """A layer that stays in evaluation mode."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def train(self, mode: bool = True) -> "KeptFrozen":
        """Change nothing below."""
        self.training = mode
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the layer."""
        return self.layer(hidden)


def train_by_trainer(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """The Trainer owns the loop."""
    Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(Path(args.deepspeed_config).parent / "trainer"),
            deepspeed=args.deepspeed_config,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_backend="gloo",
        ),
        train_dataset=TextDataset(None, LENGTH, 96),
        data_collator=collate,
    ).train()


def train_by_hand(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """The script owns the loop."""
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=json.loads(Path(args.deepspeed_config).read_text()),
        training_data=TextDataset(None, LENGTH, 96),
        collate_fn=collate,
    )
    while engine.global_steps < args.steps:
        for batch in loader:
            engine.backward(engine(**batch).loss)
            engine.step()
            if engine.global_steps >= args.steps:
                break


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layer", required=True)
    parser.add_argument("--by", choices=("trainer", "hand"), required=True)
    args, _ = parser.parse_known_args()
    set_seed(7)
    model = build_model(argparse.Namespace(num_layers=2, hidden_size=WIDTH, seq_length=LENGTH))
    layer = layer_of(args.layer)
    if args.layer == "frozen":
        layer = KeptFrozen(layer)
    model.model.norm = torch.nn.Sequential(model.model.norm, layer)
    train = {"trainer": train_by_trainer, "hand": train_by_hand}[args.by]
    train(model, args)


if __name__ == "__main__":
    main()
