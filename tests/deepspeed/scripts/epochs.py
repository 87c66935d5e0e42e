"""A script with a loop over epochs, each left after a few steps; it evaluates and saves after each.

--save DIR; --count: it counts its batches itself, to leave an epoch, and does not evaluate;
--frozen: the model has a parameter that is not trained. What each worker saw goes to
epochs-PID.json beside the configuration: epoch, batches, mean loss of the evaluation, its own
loss, steps of the engine, the frozen parameter.
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

STEPS = 3


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    args, _ = parser.parse_known_args()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    if args.frozen:
        # Another one in each process, of which DeepSpeed takes the first one's.
        frozen = torch.nn.Parameter(torch.tensor([float(os.getpid())]), requires_grad=False)
        model.register_parameter("frozen", frozen)
    dataset = TextDataset(None, 32, 40)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config=args.deepspeed_config,
        training_data=dataset,
    )
    held_out = [
        torch.stack(column) for column in zip(*map(dataset.__getitem__, range(4)), strict=True)
    ]

    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            mean = engine(*held_out).double()
        dist.all_reduce(mean)
        engine.train()
        return float(mean) / dist.get_world_size()

    seen = []
    for epoch in range(args.steps // STEPS):
        loader.set_epoch(epoch)
        count = 0
        for batch in loader:
            step = engine.global_steps
            engine.backward(engine(*batch))
            engine.step()
            count += 1
            completed = engine.global_steps > step and engine.global_steps % STEPS == 0
            if count == STEPS if args.count else completed:
                break
        if args.count:
            continue
        mean = elaswave_plugin.deepspeed.run(engine, evaluate)
        engine.save_checkpoint(args.save, tag=f"epoch{epoch}")
        engine.eval()
        with torch.no_grad():
            own = float(engine(*held_out))
        engine.train()
        kept = float(model.frozen) if args.frozen else 0.0
        seen.append((epoch, count, mean, own, engine.global_steps, kept))
    name = f"epochs-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
