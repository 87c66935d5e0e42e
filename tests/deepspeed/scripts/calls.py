"""A script with each call of `elaswave_plugin.deepspeed`, marked [elastic] for its mutants."""

import argparse
import json
import sys
from pathlib import Path

import deepspeed  # noqa: F401  # which mutants call
import torch

from elaswave_plugin import deepspeed as elaswave  # [elastic] 1

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset


def main() -> None:
    """Train, and evaluate after each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    args, _ = parser.parse_known_args()
    with open(args.deepspeed_config) as file:
        config = json.load(file)
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    elaswave.install()  # [elastic] 2
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    train, held_out = TextDataset(None, 32, 64), TextDataset(None, 32, 4)
    engine, _, _, _ = elaswave.initialize(  # [elastic] 3
        model=model, model_parameters=model.parameters(), config=config
    )
    batches = elaswave.loader(engine, train)  # [elastic] 4

    def evaluate():
        engine.eval()
        columns = zip(*map(held_out.__getitem__, range(4)), strict=True)
        with torch.no_grad():
            loss = engine(*map(torch.stack, columns)).double()
        torch.distributed.all_reduce(loss)
        engine.train()
        return float(loss) / torch.distributed.get_world_size()

    while engine.global_steps < args.steps:
        for tokens, labels in batches:
            before = engine.global_steps
            engine.backward(engine(tokens, labels))
            engine.step()
            if engine.global_steps > before:
                mean = elaswave.run(engine, evaluate)  # [elastic] 5
                said = f"step {before} | held out {mean}"
                if torch.distributed.get_rank() == 0:
                    print(said, flush=True)
            if engine.global_steps == args.steps:
                break
    engine.destroy()


if __name__ == "__main__":
    main()
