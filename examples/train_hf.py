"""Train LoRA adapters of a small Llama with transformers.Trainer; no line of elaswave_plugin."""

from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig, get_peft_model
from train_accelerate import build_model, collate
from train_deepspeed import TextDataset
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """Model and data; everything else is the Trainer's own: --deepspeed, --max_steps, ..."""

    text: Path | None = field(default=None, metadata={"help": "file, or folder with Python files"})
    limit: int | None = field(default=None, metadata={"help": "most samples to use"})
    num_layers: int = 4
    hidden_size: int = 128
    seq_length: int = 128
    lora_rank: int = 8


def main() -> None:
    """Train the adapters, and save them."""
    parser = HfArgumentParser([ModelArguments, TrainingArguments])
    parser.set_defaults(output_dir="out/hf/model", remove_unused_columns=False)
    own, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    adapters = LoraConfig(r=own.lora_rank, target_modules=["q_proj", "v_proj"])
    trainer = Trainer(
        model=get_peft_model(build_model(own), adapters),
        args=args,
        train_dataset=TextDataset(own.text, own.seq_length, own.limit),
        data_collator=collate,
    )
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    main()
