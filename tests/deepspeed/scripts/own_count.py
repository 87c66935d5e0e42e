"""A loop that counts its batches in a variable of its own, to --count; --save DIR: saves after it.

What each worker saw goes to own-count-PID.json beside the configuration: batches, steps of the
engine.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--count", type=int)
    parser.add_argument("--save")
    args, _ = parser.parse_known_args()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.deepspeed_config,
        training_data=TextDataset(None, 32),
    )
    count = 0
    for tokens, labels in loader:
        engine.backward(engine(tokens, labels))
        engine.step()
        count += 1
        if count == args.count:
            break
    if args.save:
        engine.save_checkpoint(args.save, tag="end")
    name = f"own-count-{os.getpid()}.json"
    Path(args.deepspeed_config).with_name(name).write_text(json.dumps([count, engine.global_steps]))


if __name__ == "__main__":
    main()
