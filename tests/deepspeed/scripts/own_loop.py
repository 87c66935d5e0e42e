"""The lines of docs/deepspeed.md in one loop, each beside the one that a loss makes wrong.

What they find goes to own-loop-RANK-PID.json beside the configuration.
"""

import argparse
import collections
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset


def main() -> None:
    """Train, and look at each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    args, _ = parser.parse_known_args()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    dataset = TextDataset(None, 32)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.deepspeed_config,
        training_data=dataset,
    )
    held_out = torch.utils.data.Subset(dataset, range(12))

    def evaluate() -> tuple[float, float]:
        engine.eval()
        mine = engine.deepspeed_io(held_out, batch_size=1, route="eval", pin_memory=False)
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for tokens, labels in mine:
                sums += torch.tensor([engine(tokens, labels).item() * len(tokens), len(tokens)])
        dist.all_reduce(sums)
        engine.train()
        return float(sums[0] / sums[1]), float(sums[1])

    def plain() -> float:
        """Take the plain mean over the workers of the loss of the step."""
        mean = sum(own) / len(own)
        dist.all_reduce(mean)
        return float(mean / dist.get_world_size())

    parts, own = (collections.deque(maxlen=engine.gradient_accumulation_steps()) for _ in "ab")
    found = {
        "means": [],
        "evaluations": [],
        "steps": [],
        "boundaries": [],
        "first_rank": dist.get_rank(),
    }
    for tokens, labels in loader:
        before = engine.global_steps
        loss = engine(tokens, labels)
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            found["boundaries"].append(before)
        parts.append(elaswave_plugin.deepspeed.mean(engine, loss))
        own.append(loss.detach())
        engine.step()
        if engine.global_steps > before:
            mean = float(sum(parts) / len(parts))
            found["means"].append((mean, elaswave_plugin.deepspeed.run(engine, plain)))
            if dist.get_rank() == 0:
                found["steps"].append(before)
            if engine.global_steps % 2 == 0:
                found["evaluations"].append(elaswave_plugin.deepspeed.run(engine, evaluate))
        if engine.global_steps == args.steps:
            break
    found["rank"] = dist.get_rank()
    name = f"own-loop-{dist.get_rank()}-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
