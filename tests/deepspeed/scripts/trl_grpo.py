"""A stock script of TRL's GRPOTrainer, or RLOOTrainer.

With ``--beta`` the reference is the model without adapters; without them, an engine of its own.
With ``--greedy`` every completion of a prompt is the same, whichever workers generate it, so that
the loss is the distance from the reference, from which adapters differ at the start.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

sys.path += [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).parent)]
from hf_trainer import EVENTS, Tape, add
from train_accelerate import build_model
from train_trl import build_dataset, build_tokenizer
from trl_sft import settings


def brightness(completion_ids: list[list[int]], log_metric: Any, **given: Any) -> list[float]:
    """Reward large bytes; tell the longest completion, too."""
    log_metric("longest", max(map(len, completion_ids)))
    return [sum(one) / (256 * len(one)) for one in completion_ids]


def prompts(limit: int | None) -> Dataset:
    """Beginnings of paragraphs, of unequal lengths."""
    texts = build_dataset(None, limit)["text"]
    return Dataset.from_dict(
        {"prompt": [one[: 4 + number % 9] for number, one in enumerate(texts)]}
    )


def parse_arguments() -> argparse.Namespace:
    """Arguments of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--evaluate", type=int)
    parser.add_argument("--save", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rloo", action="store_true")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--loss", default="dapo")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--per-generation", type=int)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--greedy", action="store_true")
    args, _ = parser.parse_known_args()
    return args


def main() -> None:
    """Train."""
    args = parse_arguments()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    tokenizer = build_tokenizer()
    model = build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32))
    # A reference is read again from where the model came.
    base = str(place / f"base-{os.getpid()}")
    model.save_pretrained(base)
    shared = {
        **settings(args, place),
        "gradient_accumulation_steps": args.accumulation,
        "num_generations": args.generations,
        "steps_per_generation": args.per_generation,
        "num_iterations": args.iterations,
        "max_completion_length": 8,
        "beta": args.beta,
        "log_completions": False,
        "model_init_kwargs": {"dtype": "float32"},
        "generation_kwargs": {"do_sample": False} if args.greedy else None,
    }
    config = RLOOConfig(**shared) if args.rloo else GRPOConfig(**shared, loss_type=args.loss)
    adapters = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=not args.greedy
    )
    trainer = (RLOOTrainer if args.rloo else GRPOTrainer)(
        model=base,
        reward_funcs=brightness,
        args=config,
        train_dataset=prompts(None),
        eval_dataset=prompts(8) if args.evaluate else None,
        processing_class=tokenizer,
        peft_config=adapters if args.lora else None,
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
