"""A stock script with a torch DataLoader of its own; with --loader, one line makes it ours.

It initializes torch.distributed itself and ends without destroying the engine. With --init its
model is cut by deepspeed.zero.Init as it is built.
"""

import argparse
import sys
from contextlib import nullcontext
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
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--init", action="store_true")
    args, _ = parser.parse_known_args()
    deepspeed.init_distributed()
    sizes = {"hidden_size": 64, "seq_length": 32, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1234)
    cut = deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config) if args.init else None
    with cut or nullcontext():
        model = GPT(argparse.Namespace(**sizes, dropout=0.0))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    dataset = TextDataset(None, 32)
    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    if args.loader:
        import elaswave_plugin.deepspeed

        loader = elaswave_plugin.deepspeed.loader(engine, loader)
    for tokens, labels in loader:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == args.steps:
            break


if __name__ == "__main__":
    main()
