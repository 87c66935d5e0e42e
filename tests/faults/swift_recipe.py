"""A fine-tuning of ms-swift as `megatron sft` runs it, of a model that a CPU trains.

Needs the package and what it imports; `tests/stand_ins` has Transformer Engine's layers. The folder
of `write` has the model and the samples.
"""

import argparse
import json
import random
import string
from pathlib import Path

# In front of ms-swift's, which imports Transformer Engine before it.
import megatron.core  # noqa: F401

_WORDS = ("a", "cat", "dog", "runs", "sees", "eats", "big", "small", "over", "under", "and")
_OFF = (
    *("cross_entropy_loss_fusion", "padding_free", "gradient_accumulation_fusion"),
    *("masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion"),
    *("apply_rope_fusion", "save_safetensors", "check_model", "load_from_cache_file"),
)


def write(folder: Path) -> None:
    """Write a model of random weights with its tokenizer, and conversations."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    letters = [*special, *string.ascii_letters, *string.digits, *" .,\n:?!-"]
    vocabulary = {one: number for number, one in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    drawn = random.Random(1)
    with (folder / "samples.jsonl").open("w") as file:
        for _ in range(64):
            said = (" ".join(drawn.choices(_WORDS, k=count)) for count in (5, 8))
            roles = zip(("user", "assistant"), said, strict=True)
            messages = [{"role": role, "content": text} for role, text in roles]
            file.write(json.dumps({"messages": messages}) + "\n")


def arguments(args: argparse.Namespace) -> list[str]:
    """Return what a user writes behind `megatron sft`."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    named = {
        "model": args.folder,
        "model_type": "qwen2",
        "template": "qwen2_5",
        "dataset": f"{args.folder}/samples.jsonl",
        "output_dir": f"{args.folder}/output",
        "tuner_type": "full",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": str(tp > 1).lower(),
        "micro_batch_size": 1,
        "global_batch_size": args.global_batch_size,
        "train_iters": args.train_iters,
        "finetune": "true",
        "lr": 1e-3,
        "min_lr": 1e-4,
        "logging_steps": 1,
        "max_length": 256,
        "attention_backend": "unfused",
        "ddp_backend": "gloo",
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "no_save_optim": "true",
        "no_save_rng": "true",
        **dict.fromkeys(_OFF, "false"),
    }
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--global-batch-size", type=int, default=8)
    args = parser.parse_known_args()[0]
    from swift.megatron import megatron_sft_main

    megatron_sft_main(arguments(args))


if __name__ == "__main__":
    main()
