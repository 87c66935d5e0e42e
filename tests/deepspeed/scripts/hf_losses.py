"""Trainers whose losses are divided by different things, on samples with few labels or many."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from hf_trainer import EVENTS, Tape, add
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from train_accelerate import build_model
from train_deepspeed import TextDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import elaswave_plugin


def label_losses(outputs: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each place, 0 where it has no label, and which ones have one."""
    wanted = labels[:, 1:]
    losses = cross_entropy(outputs.logits[:, :-1].transpose(1, 2), wanted, reduction="none")
    return losses, wanted.ne(-100)


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad the samples of a batch to the longest of them."""
    fills = {"labels": -100}
    return {
        name: pad_sequence(
            [one[name] for one in samples], batch_first=True, padding_value=fills.get(name, 0)
        )
        for name in samples[0]
    }


class OwnLoss(Trainer):
    """A Trainer with a loss of its own."""

    kind = ""
    # Of a callback's.
    scale = 1.0

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, has_label = label_losses(outputs, labels)
        distance = outputs.logits.float().square().mean((1, 2)).mean()
        by_items = losses.sum() / num_items_in_batch * self.accelerator.num_processes
        # A batch without labels has no loss, in place of a mean of nothing.
        by_labels = losses.sum() / has_label.sum().clamp(min=1)
        if self.kind == "labels":
            return by_labels
        if self.kind == "set":
            # By what is set once an update has begun.
            return by_labels * self.scale / self.current_gradient_accumulation_steps
        if self.kind == "places":
            return by_items + losses.mean()
        if self.kind == "classes":
            # Samples of another class count more, in the mean over a batch.
            classes = 1.0 + inputs["input_ids"][:, 0] % 3
            means = losses.sum(1) / has_label.sum(1).clamp(min=1)
            return (means * classes).sum() / classes.sum()
        if self.kind == "samples":
            return (losses.sum(1) / has_label.sum(1).clamp(min=1)).mean()
        if self.kind == "mixed":
            return 0.5 * by_items + 0.5 * distance
        if self.kind == "terms":
            return 0.5 * elaswave_plugin.terms(tokens=by_items, samples=distance)
        if self.kind == "label terms":
            return elaswave_plugin.terms(tokens=by_labels, samples=distance)
        # Of pairs of samples of a batch.
        first, second = outputs.logits.float().mean((1, 2)).roll(1), losses.mean(1)
        return (first * second).mean() + by_items


class SetsScale(TrainerCallback):
    """Gives the losses of each step another weight."""

    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Once a step."""
        self.trainer.scale = 1.0 + 0.5 * state.global_step


def not_finite(base: type[Trainer], step: int | None) -> type[Trainer]:
    """Return a Trainer whose loss is NaN in this step, of which the gradient knows nothing."""

    class NotFinite(base):  # type: ignore[misc, valid-type]
        """Counts from 0."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **more)
            return loss + float("nan") if self.state.global_step == step else loss

    return NotFinite


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loss", default="items")
    parser.add_argument("--unlabelled", default="", help="items of the data without a label")
    parser.add_argument("--limit", type=int, default=96, help="samples of an epoch")
    parser.add_argument("--padded", action="store_true", help="samples of different lengths")
    parser.add_argument("--grouped", action="store_true", help="group_by_length")
    parser.add_argument("--own-items", action="store_true", help="items of a worker's own batches")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--not-finite", type=int, help="the loss of this step")
    parser.add_argument("--says", help='"loss" of the section "elaswave"')
    parser.add_argument("--no-filter", action="store_true", help="logged as it is")
    args, _ = parser.parse_known_args()
    unlabelled = set(filter(None, args.unlabelled.split(",")))
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    dataset = TextDataset(None, 32, args.limit)

    class Ragged(torch.utils.data.Dataset):
        """Samples of which the first places, of another number each, have no label."""

        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
            tokens, _ = dataset[item]
            labels = tokens.clone()
            labels[: 32 if str(item) in unlabelled else item * 7 % 30] = -100
            kept = slice(16 + item * 5 % 16 if args.padded else 32)
            sample = {"input_ids": tokens, "labels": labels, "attention_mask": tokens.ne(-1).long()}
            return {name: one[kept] for name, one in sample.items()}

    config = json.loads(Path(args.deepspeed_config).read_text())
    config["elaswave"] |= {"loss": args.says} if args.says else {}
    OwnLoss.kind = args.loss
    made = not_finite(Trainer if args.loss == "items" else OwnLoss, args.not_finite)
    trainer = made(
        model=build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32)),
        args=TrainingArguments(
            output_dir=str(place / "trainer"),
            deepspeed=config,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=not args.own_items,
            train_sampling_strategy="group_by_length" if args.grouped else "random",
            learning_rate=1e-3,
            logging_steps=1,
            logging_nan_inf_filter=not args.no_filter,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
        ),
        train_dataset=Ragged(),
        data_collator=padded,
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    )
    if args.loss == "set":
        trainer.add_callback(SetsScale())
        SetsScale.trainer = trainer
    trainer.train()
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
