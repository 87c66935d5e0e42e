"""Loops of a script's own whose numbers follow the number of workers, by --what.

"lines": what scripts write, each line that has to be told marked with the call; "page": the recipe
of docs/deepspeed.md as it stands there. The numbers of each step go to widths-RANK-PID.json beside
the configuration.
"""

import argparse
import collections
import json
import os
import re
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as of_compiled
from deepspeed.utils import groups

import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def recipe() -> str:
    """The lines of the page."""
    section = PAGE.read_text().partition("## The loss of a step over all workers\n")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def lines(engine, loader, dataset, steps, found):
    """Sums of all kinds, each divided by the width of the launch, and products of the width."""
    world = dist.get_world_size()
    batch = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()

    def evaluate():
        engine.eval()
        mean = torch.tensor(float(engine(*held_out)))
        dist.all_reduce(mean)  # told: all_reduce
        engine.train()
        return float(mean / world)

    held_out = [torch.stack(one) for one in zip(*(dataset[place] for place in (0, 1)), strict=True)]
    for tokens, labels in loader:
        before = engine.global_steps
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == before:
            continue
        own = loss.detach()
        total, mean, first, by_deepspeed = (own.clone() for _ in range(4))
        dist.all_reduce(total)  # told: all_reduce
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # told: all_reduce
        dist.reduce(first, dst=0)  # told: reduce
        deepspeed.comm.all_reduce(by_deepspeed)  # told: all_reduce
        several = [None] * dist.get_world_size()  # told: get_world_size
        dist.all_gather_object(several, own.item())  # told: all_gather_object
        width = groups._get_data_parallel_world_size()  # told: _get_data_parallel_world_size
        everyone = dist.group.WORLD
        parts = of_compiled.all_gather_tensor(own[None], 0, everyone)  # told: all_gather_tensor
        ranks = dist.get_process_group_ranks(everyone)  # told: get_process_group_ranks
        flag = torch.zeros(1)
        dist.broadcast(flag, src=0)
        dist.barrier()
        found.append(
            {
                "once": float(total / world),
                "evaluated": elaswave_plugin.deepspeed.run(engine, evaluate),
                "mean": float(mean),
                "by_deepspeed": float(by_deepspeed / world),
                "gathered": sum(several) / world,
                "samples": batch * width,
                "by_engine": batch * engine.dp_world_size,  # told: dp_world_size
                "by_ranks": batch * len(ranks),
                "compiled": float(of_compiled.wait_tensor(parts).sum() / world),
            }
        )
        if engine.global_steps == steps:
            break


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--what", required=True)
    args, _ = parser.parse_known_args()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    config = json.loads(Path(args.deepspeed_config).read_text())
    dataset = TextDataset(None, 32, args.steps * config["train_batch_size"])
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=dataset
    )
    found = []
    if args.what == "lines":
        lines(engine, loader, dataset, args.steps, found)
    else:

        def noted(step, value):
            found.append((step, value))

        names = {"engine": engine, "loader": loader, "print": noted}
        names |= {"collections": collections, "torch": torch, "elaswave_plugin": elaswave_plugin}
        exec(recipe(), names)
    name = f"widths-{dist.get_rank()}-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
