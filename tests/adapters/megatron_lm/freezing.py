"""Runs pretrain_gpt.py with frozen weights: --freeze parts (of all layers), or --freeze layers.

A fine-tuning script does so in its model provider, as examples/multimodal has it.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def freeze(model: Any, what: str) -> None:
    """Freeze positions and the first linear layer of each MLP; or positions and all of layer 1."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for name, param in model.named_parameters():
        if "position_embeddings" in name or (what == "parts" and "linear_fc1.weight" in name):
            param.requires_grad = False
    for module in model.modules():
        if isinstance(module, TransformerLayer) and module.layer_number == 1 and what == "layers":
            module.requires_grad_(False)


def main() -> None:
    """Run the script beside this file."""
    folder, place = Path(__file__).parent, sys.argv.index("--freeze")
    _, what = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    sys.path.insert(0, str(folder))
    import megatron.training

    native = megatron.training.pretrain

    def pretrain(datasets: Any, provide: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The script's call, with a model of which some is frozen."""

        def provide_frozen(*given: Any, **named: Any) -> Any:
            model = provide(*given, **named)
            freeze(model, what)
            return model

        return native(datasets, provide_frozen, *args, **kwargs)

    megatron.training.pretrain = pretrain
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
