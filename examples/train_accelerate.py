"""Train a small Llama on text with HF Accelerate and DeepSpeed; no line of elaswave_plugin."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from train_deepspeed import VOCABULARY_SIZE, TextDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


def parse_arguments() -> argparse.Namespace:
    """Arguments of the model and the data; ZeRO, dtype and elaswave are in the configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed's JSON configuration")
    parser.add_argument("--text", type=Path, help="file, or folder with Python files")
    parser.add_argument("--limit", type=int, help="most samples to use")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=1, help="samples of a worker at a time")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A model from a configuration; nothing is downloaded."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=args.hidden_size,
            intermediate_size=2 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            max_position_embeddings=args.seq_length,
        )
    )


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tokens, which the model itself shifts to get the labels."""
    tokens = torch.stack([tokens for tokens, _ in samples])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train until ``--steps`` steps are done."""
    args = parse_arguments()
    set_seed(args.seed)
    # Without a GPU, Accelerate has to be told that there are processes to talk to.
    cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(
        kwargs_handlers=cpu,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    # Accelerate steps a scheduler once a process, so that its length is in batches of all of them.
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 0, args.steps * accelerator.num_processes
    )
    dataset = TextDataset(args.text, args.seq_length, args.limit)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    step = 0
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(
                    f"step {step:4d} | loss {mean:.6f} | lr {scheduler.get_last_lr()[0]:.2e}"
                )
                step += 1
            if step == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
