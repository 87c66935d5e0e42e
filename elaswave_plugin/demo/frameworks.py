"""The demo's job under each framework: preloaded modules, data, arguments."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_plugin.demo.options import (
    ATTENTION_HEADS,
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEQUENCE_LENGTH,
    DemoOptions,
)

_ALWAYS = ("torch", "numpy", "pydantic")
_MEGATRON = (
    "elaswave_plugin.adapters.megatron",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_model",
)
_DEEPSPEED = (
    "deepspeed",
    "elaswave_plugin.adapters.deepspeed.attach",
    # What deepspeed.initialize imports, which takes two seconds in each process.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "torch._dynamo",
)


def preload_of(framework: str) -> tuple[str, ...]:
    """Modules that the demo's zygote imports."""
    return (*_ALWAYS, *(_DEEPSPEED if framework == "deepspeed" else _MEGATRON))


def write_plain_text(options: DemoOptions, path: Path) -> None:
    """Write the files of the source into one, for a script that reads bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0".join(one.read_bytes() for one in options.source.paths))


def arguments(options: DemoOptions, *, data: Path, settings: Mapping[str, Any]) -> list[str]:
    """The script's arguments; `settings` are the plugin's own, by their keys."""
    sizes = [
        *("--num-layers", str(options.layout.num_layers)),
        *("--hidden-size", "128"),
        *("--num-attention-heads", str(ATTENTION_HEADS)),
        *("--seq-length", str(SEQUENCE_LENGTH)),
        *("--seed", str(options.seed)),
    ]
    if options.framework == "megatron":
        return [*_megatron_arguments(options, data), *sizes, "--elaswave", *_as_options(settings)]
    return [*_deepspeed_arguments(options, data, settings), *sizes]


def _megatron_arguments(options: DemoOptions, data: Path) -> list[str]:
    return [
        *("--data-path", str(data)),
        *("--train-iters", str(options.steps)),
        *("--micro-batch-size", str(MICRO_BATCH)),
        *("--global-batch-size", str(GLOBAL_BATCH)),
        *(_parallel(options) if options.is_hybrid else ()),
    ]


def _parallel(options: DemoOptions) -> list[str]:
    layout = options.layout
    return [
        *("--tensor-model-parallel-size", str(layout.tp)),
        *("--pipeline-model-parallel-size", str(len(layout.stages))),
        *(["--sequence-parallel"] if layout.tp > 1 else []),
    ]


def _as_options(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in settings.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--elaswave-{key.replace('_', '-')}", str(one)]
    return words


def _deepspeed_arguments(
    options: DemoOptions, data: Path, settings: Mapping[str, Any]
) -> list[str]:
    """The shipped configuration with the demo's sizes and settings, written beside the run."""
    folder = Path(__file__).resolve().parents[2] / "configs"
    shipped = folder / f"deepspeed_zero{max(1, options.zero)}.json"
    config = json.loads(shipped.read_text())
    config["train_batch_size"] = GLOBAL_BATCH
    config["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    config["gradient_accumulation_steps"] = GLOBAL_BATCH // (MICRO_BATCH * options.nproc)
    config["zero_optimization"]["stage"] = options.zero
    config["elaswave"] = {"enabled": True, **settings}
    path = Path(f"{settings['dir']}.json")
    path.write_text(json.dumps(config, indent=2) + "\n")
    return [
        *("--deepspeed_config", str(path)),
        *("--text", str(data)),
        *("--steps", str(options.steps)),
    ]
