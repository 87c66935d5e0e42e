"""A script that evaluates together after every other step, as announced work between steps.

Every worker evaluates its part of the samples, and rank 0's monitor gets the mean. The results go
to evaluations-RANK-PID.json beside the configuration, one entry a call that returned one.
"""

import argparse
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

NUM_SAMPLES = 12


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--passes", type=int, default=1, help="over the same samples, of one call")
    parser.add_argument("--every", type=int, default=2, help="steps")
    parser.add_argument("--by-launch", action="store_true", help="divide by its workers")
    args, _ = parser.parse_known_args()
    launched = int(os.environ["WORLD_SIZE"])
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=args.dropout))
    dataset = TextDataset(None, 32)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.deepspeed_config,
        training_data=dataset,
    )

    def evaluate() -> float:
        """Mean loss over the same samples, whoever evaluates them."""
        engine.eval()
        rank, width = dist.get_rank(), dist.get_world_size()
        samples = torch.utils.data.Subset(dataset, range(NUM_SAMPLES))
        # DeepSpeed's loader has the shards of when it is made: after a loss, those of who is left.
        loader = engine.deepspeed_io(samples, batch_size=1, route="eval", pin_memory=False)
        mine = (
            [(one[0], other[0]) for one, other in loader]
            if args.loader
            else [*samples][rank::width]
        )
        tokens, labels = (torch.stack(column) for column in zip(*mine, strict=True))
        with torch.no_grad():
            for _ in range(args.passes):
                loss = engine(tokens, labels)
            part = NUM_SAMPLES / launched if args.by_launch else len(mine)
            total = loss.double() * part
        dist.all_reduce(total)
        engine.train()
        mean = float(total) / NUM_SAMPLES
        engine.monitor.write_events([("Eval/loss", mean, engine.global_steps)])
        return mean

    results = []
    for batch in loader:
        step = engine.global_steps
        engine.backward(engine(*batch))
        engine.step()
        if engine.global_steps > step and engine.global_steps % args.every == 0:
            mean = elaswave_plugin.deepspeed.run(engine, evaluate)
            if mean is not None:
                results.append((engine.global_steps, mean))
        if engine.global_steps == args.steps:
            break
    name = f"evaluations-{dist.get_rank()}-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
