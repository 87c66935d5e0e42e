"""A Trainer whose batches are of two tasks with different keys, or whose model has experts."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from hf_trainer import EVENTS, Tape, add
from torch.nn.functional import cross_entropy
from train_accelerate import build_model
from train_deepspeed import VOCABULARY_SIZE, TextDataset
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import elaswave_plugin

LENGTH = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}


class Tasks(torch.utils.data.Dataset):
    """Texts with labels, and texts with a class and its weight: by blocks of samples."""

    def __init__(self, block: int) -> None:
        self.texts = TextDataset(None, LENGTH, 96)
        self.block = block

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.texts[item]
        labels = tokens.clone()
        labels[: item * 7 % 30] = -100
        sample = {"input_ids": tokens, "labels": labels}
        if self.block and item // self.block % 2:
            sample |= {"kind": torch.tensor(item % 5), "weight": torch.tensor(1.0 + item % 3)}
        return sample


class RouterTerms(Trainer):
    """The router's loss is named, as a mean over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        router = self.model.router_aux_loss_coef * outputs.aux_loss
        tokens = (outputs.loss - router) * self.accelerator.num_processes
        return elaswave_plugin.terms(tokens=tokens, samples=router)


class TasksTrainer(Trainer):
    """The mean over labels, or over classes; the order of the data is that of the dataset."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if "kind" not in inputs:
            outputs = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            return cross_entropy(outputs.transpose(1, 2), inputs["labels"][:, 1:])
        logits = model(input_ids=inputs["input_ids"]).logits[:, -1]
        losses = cross_entropy(logits, inputs["kind"], reduction="none")
        return (losses * inputs["weight"]).mean()


def by_task(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All samples of a batch are of one task."""
    assert all(one.keys() == samples[0].keys() for one in samples), "a batch of two tasks"
    return in_common(samples)


def in_common(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the values that all samples of a batch have."""
    names = [name for name in samples[0] if all(name in one for one in samples)]
    return {name: torch.stack([one[name] for one in samples]) for name in names}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--block", type=int, default=0, help="samples of a task behind each other")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--terms", action="store_true")
    parser.add_argument("--drops", action="store_true", help="what samples have not in common")
    parser.add_argument("--says", help="what the section says of the loss")
    args, _ = parser.parse_known_args()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    config = json.loads(Path(args.deepspeed_config).read_text())
    if args.says:
        config["elaswave"]["loss"] = args.says
    set_seed(7)
    if args.model == "mixtral":
        model: Any = MixtralForCausalLM(
            MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        )
    elif args.model == "qwen":
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **SIZES,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
            )
        )
    else:
        model = build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=LENGTH))
    made = TasksTrainer if args.block else RouterTerms if args.terms else Trainer
    made(
        model=model,
        args=TrainingArguments(
            output_dir=str(place / "trainer"),
            deepspeed=config,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
        ),
        train_dataset=Tasks(args.block),
        data_collator=in_common if args.drops else by_task,
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    ).train()


if __name__ == "__main__":
    main()
