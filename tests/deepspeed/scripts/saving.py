"""A stock script that saves, evaluates after it, and may load a checkpoint first.

--save DIR, --load DIR, --passes-over the batches before what it loaded, --every STEPS between two
saves (2); --resume loads from the DIR of --save,
where there is a checkpoint; the losses of the evaluations go to DIR/evaluations-RANK-PID.json. What
--load loaded is saved again at once, as the tag "loaded".
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
    """Train, save, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--passes-over", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--every", type=int, default=2)
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
    if args.load:
        path, _ = engine.load_checkpoint(args.load)
        assert path is not None
        engine.save_checkpoint(args.save, tag="loaded", save_latest=False)
    last = engine.global_steps + args.steps
    if args.resume and (Path(args.save) / "latest").exists():
        path, _ = engine.load_checkpoint(args.save)
        print(f"loaded {path}")
    tokens, labels = (
        torch.stack(column) for column in zip(*map(dataset.__getitem__, range(4)), strict=True)
    )
    evaluations = {}
    read = engine.global_steps * engine.gradient_accumulation_steps() if args.passes_over else 0
    for batch in loader:
        if read:
            read -= 1
            continue
        step = engine.global_steps
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        if engine.global_steps > step and engine.global_steps % args.every == 0:
            engine.save_checkpoint(args.save)
            engine.eval()
            with torch.no_grad():
                evaluations[engine.global_steps] = float(engine(tokens, labels))
            engine.train()
        if engine.global_steps == last:
            break
    name = f"evaluations-{torch.distributed.get_rank()}-{os.getpid()}.json"
    (Path(args.save) / name).write_text(json.dumps(evaluations))
    engine.destroy()


if __name__ == "__main__":
    main()
