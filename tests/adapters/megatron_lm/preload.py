"""The imports of a zygote before it forks workers that run pretrain_gpt.py."""

import multiprocessing.spawn
from typing import Any

from elaswave_plugin.adapters.megatron_lm.triton_stub import without_triton


def import_everything() -> None:
    """Import what the script imports, which takes ten seconds in each process."""
    without_triton()
    for name in (
        "elaswave_plugin.adapters.megatron_lm.attach",
        "gpt_builders",
        "megatron.training.datasets.fim_dataset",
        "megatron.training.datasets.sft_dataset",
        "model_provider",
    ):
        __import__(name)


def start_writers_without_the_script() -> None:
    """Megatron-Core's checkpoint writer starts a process that would import all of that again."""
    native = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {
            key: value for key, value in native(name).items() if not key.startswith("init_main")
        }

    multiprocessing.spawn.get_preparation_data = prepared  # type: ignore[assignment]


import_everything()
start_writers_without_the_script()
