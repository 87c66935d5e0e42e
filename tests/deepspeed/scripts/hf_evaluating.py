"""An Accelerate script with an evaluation after each step, without accumulate() and end_training().

What the evaluations saw goes to DIR/evaluations-RANK-PID.json: [step, samples, mean loss] each.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, SubsetRandomSampler

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_accelerate import build_model, collate
from train_deepspeed import TextDataset


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sampler", default="random")
    parser.add_argument("--split-batches", action="store_true")
    parser.add_argument("--dispatch-batches", action="store_true")
    args, _ = parser.parse_known_args()
    set_seed(7)
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config),
        dataloader_config=DataLoaderConfiguration(
            split_batches=args.split_batches, dispatch_batches=args.dispatch_batches or None
        ),
    )
    model = build_model(argparse.Namespace(num_layers=1, hidden_size=32, seq_length=16))
    optimizer = DummyOptim(model.parameters())
    scheduler = DummyScheduler(optimizer)
    dataset, held_out = TextDataset(None, 16, 200), TextDataset(None, 16, 21)
    size = 4 if args.split_batches else 1
    sampler = SubsetRandomSampler(range(200)) if args.sampler == "subset" else None
    loader = DataLoader(
        dataset, batch_size=size, shuffle=sampler is None, sampler=sampler, collate_fn=collate
    )
    evaluation = DataLoader(held_out, batch_size=max(2, size), collate_fn=collate)
    model, optimizer, scheduler, loader, evaluation = accelerator.prepare(
        model, optimizer, scheduler, loader, evaluation
    )
    seen = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        model.eval()
        losses = []
        for held in evaluation:
            with torch.no_grad():
                one = model(**held).loss
            losses.append(accelerator.gather_for_metrics(one.repeat(len(held["input_ids"]))))
        model.train()
        assert len(losses) == len(evaluation)  # told: __len__
        assert model.global_steps <= len(loader)
        together = torch.cat(losses)
        seen.append((model.global_steps, len(together), float(together.mean())))
        accelerator.wait_for_everyone()
        if model.global_steps == args.steps:
            break
    name = f"evaluations-{accelerator.process_index}-{os.getpid()}.json"
    (Path(args.deepspeed_config).parent / name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
