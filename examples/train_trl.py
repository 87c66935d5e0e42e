"""Fine-tune LoRA adapters of a small Llama with TRL's SFTTrainer; no line of elaswave_plugin."""

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train_accelerate import build_model
from transformers import HfArgumentParser, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


@dataclass
class ModelArguments:
    """Model and data; everything else is TRL's own: --deepspeed, --max_steps, --packing, ..."""

    text: Path | None = field(default=None, metadata={"help": "file, or folder with Python files"})
    limit: int | None = field(default=None, metadata={"help": "most samples to use"})
    num_layers: int = 4
    hidden_size: int = 128
    seq_length: int = 128
    lora_rank: int = field(default=8, metadata={"help": "0 trains the whole model"})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte; nothing is downloaded. The zero byte ends a sample."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    zero = "\N{LATIN CAPITAL LETTER A WITH MACRON}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=zero, eos_token=zero)


def build_dataset(path: Path | None, limit: int | None) -> Dataset:
    """Paragraphs of a text, of unequal lengths."""
    root = Path(path or Path(sysconfig.get_path("stdlib")) / "json")
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    paragraphs = [one for file in files for one in file.read_text().split("\n\n") if one.strip()]
    return Dataset.from_dict({"text": paragraphs[:limit]})


def main() -> None:
    """Train, and save what was trained."""
    parser = HfArgumentParser([ModelArguments, SFTConfig])
    parser.set_defaults(output_dir="out/trl/model")
    own, args = parser.parse_args_into_dataclasses()
    args.max_length = own.seq_length
    set_seed(args.seed)
    adapters = LoraConfig(r=own.lora_rank, target_modules=["q_proj", "v_proj"])
    trainer = SFTTrainer(
        model=build_model(own),
        args=args,
        train_dataset=build_dataset(own.text, own.limit),
        processing_class=build_tokenizer(),
        peft_config=adapters if own.lora_rank else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
