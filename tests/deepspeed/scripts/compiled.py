"""Runs --script with compiled passes; says at its end how many frames. --backend: torch.compile's.

--how: "engine": by the engine, as torch_compile in TrainingArguments has it done; "module",
"blocks", "wrapped": by the script before DeepSpeed has the model, which is all of it, each of its
layers, or `torch.compile(model)`.
"""

import argparse
import runpy
import sys
from pathlib import Path

import deepspeed
import torch


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    example = Path(__file__).resolve().parents[3] / "examples" / "train_deepspeed.py"
    parser.add_argument("--script", default=example)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--how", default="engine")
    args, sys.argv[1:] = parser.parse_known_args()
    native = deepspeed.initialize

    def initialize(*inputs, model, **named):
        if args.how == "module":
            model.compile(backend=args.backend)
        if args.how == "blocks":
            for block in model.blocks:
                block.compile(backend=args.backend)
        if args.how == "wrapped":
            model = torch.compile(model, backend=args.backend)
        engine, *others = native(*inputs, model=model, **named)
        if args.how == "engine":
            engine.compile(backend=args.backend)
        return engine, *others

    deepspeed.initialize = initialize
    runpy.run_path(str(args.script), run_name="__main__")
    print("compiled frames:", torch._dynamo.utils.counters["frames"]["ok"])


if __name__ == "__main__":
    main()
