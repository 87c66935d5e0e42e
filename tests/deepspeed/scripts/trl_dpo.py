"""A stock script of TRL's DPOTrainer with LoRA, whose reference is the model without adapters."""

import argparse
import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

sys.path += [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).parent)]
from hf_trainer import EVENTS, Tape, add
from train_accelerate import build_model
from train_trl import build_dataset, build_tokenizer


def preferences(limit: int | None) -> Dataset:
    """Pairs of paragraphs; the longer one is preferred."""
    texts = build_dataset(None, limit)["text"]
    both = zip(texts, texts[::-1], strict=True)
    pairs = [sorted((one[:24], other[:16]), key=len) for one, other in both]
    return Dataset.from_dict(
        {
            "prompt": ["text: "] * len(pairs),
            "chosen": [longer for _, longer in pairs],
            "rejected": [shorter for shorter, _ in pairs],
        }
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--evaluate", type=int)
    args, _ = parser.parse_known_args()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    trainer = DPOTrainer(
        model=build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=64)),
        args=DPOConfig(
            output_dir=str(place / "trainer"),
            deepspeed=args.deepspeed_config,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            eval_strategy="steps" if args.evaluate else "no",
            eval_steps=args.evaluate,
            save_strategy="no",
            max_length=64,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=preferences(None),
        eval_dataset=preferences(21) if args.evaluate else None,
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
