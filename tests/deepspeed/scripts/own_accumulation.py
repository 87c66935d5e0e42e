"""A script that does itself what the engine would do: boundaries, backward passes, the batch size.

--what: "boundary" says which micro-batch is a step's last, "loss" and "scale" go backward from the
loss without the engine, "batch" doubles the batch.
"""

import argparse
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_deepspeed import GPT, TextDataset


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
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.deepspeed_config,
        training_data=TextDataset(None, 32),
    )
    if args.what == "batch":
        engine.set_train_batch_size(2 * engine.train_batch_size())
    count = engine.gradient_accumulation_steps()
    batches = iter(loader)
    while engine.global_steps < args.steps:
        for order in range(count):
            if args.what == "boundary":
                engine.set_gradient_accumulation_boundary(order == count - 1)
            loss = engine(*next(batches))
            if args.what == "loss":
                loss.backward()
            elif args.what == "scale":
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            if args.what != "boundary" or order == count - 1:
                engine.step()


if __name__ == "__main__":
    main()
