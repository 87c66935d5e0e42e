"""A script whose loop is written in its own way, by --what.

"no_sync", "coalesce", "compiled_autograd", "model": calls of DeepSpeed's that are refused; "next":
a fixed number of batches from one iterator; "enumerate": each epoch is left by a count of batches;
"second", "gan", "twin": a second engine, with the section, without it (the loop trains it as well),
and the one without first; "unbound", "nested": an optimizer of torch's beside the engine, and one
that the engine's drives; "mean": a mean between two steps.
How many batches and steps each worker saw goes to own-calls-PID.json beside the configuration.
"""

import argparse
import contextlib
import json
import os
import sys
from itertools import islice
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.dataloader import RepeatingLoader

import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset

PER_EPOCH = 4


def initialize(config, **more):
    """One engine."""
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, **more
    )


def batches_of(what, loader, count):
    """So many batches, read as --what says."""
    if what == "enumerate":
        for _ in range(count // PER_EPOCH):
            for number, batch in enumerate(loader):
                yield batch
                if number + 1 == PER_EPOCH:
                    break
        return
    iterator = iter(RepeatingLoader(loader))
    yield from islice(iterator, count)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--what", required=True)
    args, _ = parser.parse_known_args()
    config = json.loads(Path(args.deepspeed_config).read_text())
    plain = {key: value for key, value in config.items() if key != "elaswave"}
    if args.what == "twin":
        initialize(plain)
    engine, _, loader, _ = initialize(config, training_data=TextDataset(None, 32, 40))
    if args.what in ("second", "gan"):
        other, *_ = initialize(config if args.what == "second" else plain)
    if args.what == "compiled_autograd":
        engine.compile(compiled_autograd_enabled=True)
    if args.what == "mean":
        elaswave_plugin.deepspeed.mean(engine, 1.0)
    judge = torch.nn.Linear(4, 1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    if args.what == "nested":
        update = engine.basic_optimizer.step

        def update_both(*inputs, **named):
            of_judge.step()
            return update(*inputs, **named)

        engine.basic_optimizer.step = update_both
    count = engine.gradient_accumulation_steps()
    seen = applied = 0
    for order, batch in enumerate(batches_of(args.what, loader, args.steps * count)):
        last = (order + 1) % count == 0
        around = contextlib.nullcontext()
        if args.what == "no_sync" and not last:
            around = engine.no_sync()
        if args.what == "coalesce":
            around = engine.coalesce_grad_reduction()
        with around:
            loss = (engine.module if args.what == "model" else engine)(*batch)
            engine.backward(loss)
        engine.step()
        if args.what == "unbound":
            judge(torch.ones(4)).sum().backward()
            of_judge.step()
        if args.what == "gan":
            other.backward(other(*batch))
            other.step()
        seen += 1
        applied += engine.was_step_applied()
    found = {"seen": seen, "applied": applied, "steps": engine.global_steps}
    name = f"own-calls-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
