"""An Accelerate script that counts, evaluates, keeps the best and goes on from a checkpoint.

What its variables are at the end goes to DIR/counted-PID.json; that it is the main process at its
start, to DIR/begins.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_accelerate import build_model, collate
from train_deepspeed import TextDataset

import elaswave_plugin.deepspeed


class Progress:
    """The script's own counters, which a checkpoint has beside the model."""

    def __init__(self) -> None:
        self.step = self.epoch = self.saved = 0
        self.best = float("inf")
        self.means: list[float] = []
        self.evaluations: list[tuple[int, int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return {**vars(self), "saved": self.saved + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        vars(self).update(state)


def evaluate(accelerator: Any, model: Any, held_out: Any) -> torch.Tensor:
    """Return the losses of all samples."""
    model.eval()
    losses = []
    for held in held_out:
        with torch.no_grad():
            one = model(**held).loss
        losses.append(accelerator.gather_for_metrics(one.repeat(len(held["input_ids"]))))
    model.train()
    return torch.cat(losses)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--by-rank", action="store_true", help="the main process computes more")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--in-run", action="store_true", help="a loss has an evaluation again")
    parser.add_argument("--resume", type=Path, help="a folder with checkpoints")
    return parser.parse_known_args()[0]


def main() -> None:
    """Train epochs until ``--steps`` steps are done; evaluate, and save the best, every two."""
    args = arguments()
    set_seed(7)
    folder = args.deepspeed_config.parent
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(args.deepspeed_config)),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    model = build_model(argparse.Namespace(num_layers=1, hidden_size=32, seq_length=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 4 * args.steps)
    loader = DataLoader(
        TextDataset(None, 16, 48), batch_size=args.batch_size, shuffle=True, collate_fn=collate
    )
    held_out = DataLoader(TextDataset(None, 16, 21), batch_size=2, collate_fn=collate)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(
        model, optimizer, scheduler, loader, held_out
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    batches, per_epoch = loader, len(loader) // accelerator.gradient_accumulation_steps
    if args.resume and (found := sorted((folder / args.resume).glob("checkpoint_*"))):
        accelerator.load_state(str(found[-1]))
        accelerator.project_configuration.iteration = progress.saved
        done = progress.step % per_epoch * accelerator.gradient_accumulation_steps
        loader.set_epoch(progress.epoch)
        batches = accelerator.skip_first_batches(loader, done)
    if accelerator.is_main_process:
        with (folder / "begins").open("a") as file:
            file.write("begins\n")
    while progress.step < args.steps:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            progress.means.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.print(f"step {progress.step - 1:4d} | loss {progress.means[-1]:.6f} |")
            if args.by_rank and accelerator.is_main_process:
                model.eval()
                with torch.no_grad():
                    model(**batch)
                model.train()
            if progress.step % 2 == 0:
                work = partial(evaluate, accelerator, model, held_out)
                losses = elaswave_plugin.deepspeed.run(model, work) if args.in_run else work()
                mean = float(losses.mean())
                progress.evaluations.append((progress.step, len(losses), mean))
                if mean < progress.best:
                    progress.best = mean
                    accelerator.save_state()
                    progress.saved += 1
            if progress.step == args.steps:
                break
        progress.epoch += progress.step < args.steps
        batches = loader
    (folder / f"counted-{os.getpid()}.json").write_text(json.dumps(vars(progress)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
