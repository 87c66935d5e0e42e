"""A stock script of TRL's SFTTrainer, with the record of its callbacks of hf_trainer.py."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

sys.path += [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).parent)]
from hf_trainer import EVENTS, Tape, add
from train_accelerate import build_model
from train_trl import build_dataset, build_tokenizer


def settings(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The arguments that every one of TRL's trainers takes."""
    return {
        "output_dir": str(place / "trainer"),
        "deepspeed": args.deepspeed_config,
        "max_steps": args.steps,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "eval_strategy": "steps" if args.evaluate else "no",
        "eval_steps": args.evaluate,
        "save_strategy": "steps" if args.save else "no",
        "save_steps": args.save or 500,
        "bf16": False,
        "disable_tqdm": True,
    }


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--evaluate", type=int)
    parser.add_argument("--save", type=int)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--packing", action="store_true")
    args, _ = parser.parse_known_args()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    trainer = SFTTrainer(
        model=build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32)),
        args=SFTConfig(
            **settings(args, place),
            max_length=32,
            packing=args.packing,
        ),
        train_dataset=build_dataset(None, args.limit),
        eval_dataset=build_dataset(None, 21) if args.evaluate else None,
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if args.lora else None,
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
