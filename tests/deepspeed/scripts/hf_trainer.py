"""A stock script of transformers.Trainer, which owns the loop."""

import argparse
import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import TextDataset
from train_hf import build_model, collate


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--use-cpu", action="store_true")
    parser.add_argument("--without-deepspeed", action="store_true")
    args, _ = parser.parse_known_args()
    trainer = Trainer(
        model=build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32)),
        args=TrainingArguments(
            output_dir=str(Path(args.deepspeed_config).parent / "trainer"),
            deepspeed=None if args.without_deepspeed else args.deepspeed_config,
            use_cpu=args.use_cpu,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
        ),
        train_dataset=TextDataset(None, 32),
        data_collator=collate,
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
