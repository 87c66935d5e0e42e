"""A stock script of TRL's DPOTrainer.

With LoRA the reference is the model without adapters; without, an engine of its own.
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

sys.path += [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).parent)]
from hf_trainer import EVENTS, Tape, add
from train_accelerate import build_model
from train_trl import build_dataset, build_tokenizer
from trl_sft import settings


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
    parser.add_argument("--save", type=int)
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--reload", action="store_true", help="both, cut as they are loaded")
    parser.add_argument("--precompute", action="store_true", help="the answers of the reference")
    parser.add_argument("--sync", action="store_true", help="have the reference follow them")
    args, _ = parser.parse_known_args()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    set_seed(7)
    sizes = argparse.Namespace(num_layers=2, hidden_size=64, seq_length=64)
    model, reference = build_model(sizes), build_model(sizes) if args.full else None
    if args.precompute:
        reference = None
    with TemporaryDirectory() as folder:
        if args.reload:
            model.save_pretrained(folder)
        more = {"sync_ref_model": args.sync, "precompute_ref_log_probs": args.precompute}
        arguments = DPOConfig(**settings(args, place), max_length=64, **more)
        if args.reload:
            load = AutoModelForCausalLM.from_pretrained
            model, reference = load(folder), load(folder)
            is_cut = all(hasattr(param, "ds_id") for param in reference.parameters())
            print(f"cut: {is_cut}", flush=True)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=preferences(None),
        eval_dataset=preferences(21) if args.evaluate else None,
        processing_class=build_tokenizer(),
        peft_config=None if args.full else LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[Tape(place / f"tape-{os.getpid()}.json")],
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
