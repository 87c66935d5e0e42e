"""An Accelerate loop, in the shape of the example, over an iterable dataset.

The sums of the samples that a step had in its last iteration go to DIR/gathered-RANK-PID.json:
[step, sums] each.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_linear_schedule_with_warmup

sys.path += [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).parent)]
from hf_trainer import streamed
from train_accelerate import build_model, collate
from train_deepspeed import TextDataset


def save(accelerator: Accelerator, folder: Path, step: int, begins: dict[str, int]) -> None:
    """Save the state, and how many batches each way to resume passes over."""
    accelerator.save_state(str(folder))
    place = {name: (step, count) for name, count in begins.items()}
    (folder / "place.json").write_text(json.dumps(place))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=int, help="samples of an epoch")
    parser.add_argument("--stream", default="plain", choices=("plain", "shuffled", "drawn", "none"))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--no-dispatch", action="store_true", help="each process reads it all")
    parser.add_argument("--split-batches", action="store_true")
    parser.add_argument("--stateful", choices=("used", "asked", "given"), help="torchdata's loader")
    parser.add_argument("--skip", type=int, default=0, help="batches of the first pass")
    parser.add_argument("--save", type=int, help="step behind which the state is saved")
    parser.add_argument("--load", help="folder of such a state")
    parser.add_argument(
        "--begins", choices=("read", "at the pass", "front", "skip"), default="read"
    )
    return parser.parse_known_args()[0]


def main() -> None:
    """Train."""
    args = arguments()
    set_seed(7)
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config),
        dataloader_config=DataLoaderConfiguration(
            split_batches=args.split_batches,
            use_stateful_dataloader=args.stateful is not None,
            dispatch_batches=False if args.no_dispatch else None,
        ),
    )
    model = build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 0, args.steps * accelerator.num_processes
    )
    is_shuffled = args.stream == "shuffled"
    loader = DataLoader(
        streamed(TextDataset(None, 32, args.limit), None if args.stream == "none" else args.stream),
        batch_size=args.batch_size,
        collate_fn=default_data_collator if is_shuffled else collate,
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if args.skip:
        loader = accelerator.skip_first_batches(loader, args.skip)
    if args.stateful == "given":
        loader.load_state_dict(loader.state_dict())
    step, seen, passed = 0, [], 0
    if args.load:
        accelerator.load_state(args.load)
        step, passed = json.loads(Path(args.load, "place.json").read_text())[args.begins]
    first = loader
    if args.begins == "skip":
        first, passed = accelerator.skip_first_batches(loader, passed), 0
    batches = read = 0
    while step < args.steps:
        read = 0
        if batches and loader is not first:
            # The one that skips has counted its pass.
            loader.set_epoch(loader.iteration or first.iteration)
        for batch in loader if batches else first:
            batches, read = batches + 1, read + 1
            if batches <= passed:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean = accelerator.gather(loss.detach()).mean().item()
                sums = accelerator.gather(batch["input_ids"].sum(dim=1))
                seen.append((step, sorted(sums.tolist())))
                accelerator.print(
                    f"step {step:4d} | loss {mean:.6f} | lr {scheduler.get_last_lr()[0]:.2e}"
                )
                step += 1
                if step == args.save:
                    begins = {"read": batches, "at the pass": read, "front": 0, "skip": read}
                    save(accelerator, Path(args.deepspeed_config).parent / "saved", step, begins)
                if args.stateful == "asked":
                    accelerator.save_state(str(Path(args.deepspeed_config).parent / "saved"))
            if step == args.steps:
                break
    accelerator.end_training()
    name = f"gathered-{accelerator.process_index}-{os.getpid()}.json"
    (Path(args.deepspeed_config).parent / name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
