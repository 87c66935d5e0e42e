"""GPT-2 with dropout or other draws, in a loop of the engine, of Accelerate or of a Trainer."""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_accelerate import collate
from train_deepspeed import TextDataset

KINDS = ("sdpa", "eager", "lora", "recomputed", "functional", "collated", "together")
LOOPS = ("engine", "accelerate", "trainer")


def noisy(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate samples, with tokens changed by three generators."""
    batch = collate(samples)
    tokens, shape = batch["input_ids"], batch["input_ids"].shape
    changed = tokens.where(torch.rand(shape) > 0.1, torch.randint(256, shape))
    by_numpy = torch.from_numpy(numpy.random.rand(*shape) < 0.1)
    shift = random.choices(range(256), k=len(samples))
    return {
        "input_ids": (changed + by_numpy * torch.tensor(shift)[:, None]) % 256,
        "labels": batch["labels"],
    }


class Drawing(torch.nn.Module):
    """A model whose inputs and loss draw by functions, for each sample or all together."""

    def __init__(self, model: torch.nn.Module, *, together: bool) -> None:
        super().__init__()
        self.model, self.together = model, together

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the loss, a mean over samples."""
        given: torch.Tensor = self.model.get_input_embeddings()(input_ids)  # type: ignore[operator]
        given = given + 0.05 * torch.randn_like(given) * torch.rand(len(given), 1, 1)
        given = functional.dropout(given, 0.1)
        if self.together:
            given = given * (0.5 + torch.rand(()))
        kept = torch.bernoulli(torch.full(labels.shape, 0.8)).bool()
        places = torch.multinomial(torch.ones(len(labels), 8), 4)
        logits = self.model(inputs_embeds=given).logits.float()[:, :-1].transpose(1, 2)
        losses = functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        few = losses.gather(1, places)
        return {"loss": (losses * kept[:, 1:]).mean() + few.mean()}


def build(kind: str) -> torch.nn.Module:
    """A small model of random weights."""
    rate = 0.1 if kind in ("sdpa", "eager", "recomputed") else 0.0
    config = GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=rate,
        embd_pdrop=rate,
        resid_pdrop=rate,
        use_cache=False,
        attn_implementation="eager" if kind == "eager" else "sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config)
    if kind == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True),
        )
    draws = kind in ("functional", "together")
    return Drawing(model, together=kind == "together") if draws else model


def by_engine(model: Any, dataset: Any, collate: Any, config: str, steps: int) -> None:
    """A loop of one's own."""
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        config=config,
        training_data=dataset,
        collate_fn=collate,
    )
    while engine.global_steps < steps:
        for batch in loader:
            engine.backward(engine(**batch)["loss"])
            engine.step()
            if engine.global_steps == steps:
                break
    engine.destroy()


def by_accelerate(
    model: Any, dataset: Any, collate: Any, config: str, steps: int, size: int
) -> None:
    """A loop that Accelerate drives."""
    cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(
        kwargs_handlers=cpu, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    engine: Any = model
    while engine.global_steps < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if engine.global_steps == steps:
                break
    accelerator.end_training()


def by_trainer(
    model: Any, dataset: Any, collate: Any, config: str, steps: int, size: int, parts: int
) -> None:
    """A Trainer."""
    arguments = TrainingArguments(
        output_dir=str(Path(config).parent / "trainer"),
        deepspeed=config,
        max_steps=steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=parts,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collate).train()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--loop", choices=LOOPS)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--accumulation", type=int)
    args, _ = parser.parse_known_args()
    set_seed(7)
    model, dataset = build(args.kind), TextDataset(None, 32, 192)
    by = noisy if args.kind == "collated" else collate
    job = model, dataset, by, args.deepspeed_config, args.steps
    if args.loop == "engine":
        by_engine(*job)
    elif args.loop == "accelerate":
        by_accelerate(*job, args.batch_size)
    else:
        by_trainer(*job, args.batch_size, args.accumulation)


if __name__ == "__main__":
    main()
