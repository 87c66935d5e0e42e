"""Runs pretrain_gpt.py with a model that is changed: --freeze parts (of all layers) | layers.

With --count passes each forward pass changes a buffer. A fine-tuning script does so in its model
provider, as examples/multimodal has it.
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
        parts = ("position_embeddings", *(("linear_fc1.weight",) if what == "parts" else ()))
        if what and any(part in name for part in parts):
            param.requires_grad = False
    for module in model.modules():
        if isinstance(module, TransformerLayer) and module.layer_number == 1 and what == "layers":
            module.requires_grad_(False)


def count(model: Any) -> None:
    """Count the forward passes of the model in a buffer of its own."""
    import torch

    model.register_buffer("passes", torch.zeros(1))
    model.register_forward_pre_hook(lambda module, inputs: module.passes.add_(1) and None)


def taken(option: str) -> str:
    """Take an option of this file and its value from the command; "" where it is not there."""
    if option not in sys.argv:
        return ""
    place = sys.argv.index(option)
    _, value = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    return value


def main() -> None:
    """Run the script beside this file."""
    folder, what, counts = Path(__file__).parent, taken("--freeze"), taken("--count") == "passes"
    sys.path.insert(0, str(folder))
    import megatron.training

    native = megatron.training.pretrain

    def pretrain(datasets: Any, provide: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The script's call, with a changed model."""

        def provide_changed(*given: Any, **named: Any) -> Any:
            model = provide(*given, **named)
            freeze(model, what)
            if counts:
                count(model)
            return model

        return native(datasets, provide_changed, *args, **kwargs)

    megatron.training.pretrain = pretrain
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
