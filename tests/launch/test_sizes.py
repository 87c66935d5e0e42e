"""The numbers of workers that a script's options allow for a start."""

import json
from pathlib import Path

import pytest

from elaswave_plugin.launch.shared_job import fits

HYBRID = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7, 8]),
        (HYBRID, [4, 8]),
        (["--global-batch-size", "12", "--micro-batch-size", "2"], [1, 2, 3, 6]),
        ([*HYBRID, "--global_batch_size=2", "--micro-batch-size=1"], [4, 8]),
        ([*HYBRID, "--global-batch-size=3", "--micro-batch-size=1"], [4]),
        (["--global-batch-size", "auto"], [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_megatrons_options(args: list[str], allowed: list[int]) -> None:
    assert [workers for workers in range(1, 9) if fits(args, workers)] == allowed


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"train_batch_size": 8}, [1, 2, 4, 8]),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, [1, 2, 4]),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, [1, 2]),
        (
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            [2],
        ),
        ({"train_batch_size": "auto"}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_deepspeeds_configuration(
    tmp_path: Path, config: dict[str, object], allowed: list[int]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    args = ["--deepspeed_config", str(path)]
    assert [workers for workers in range(1, 9) if fits(args, workers)] == allowed
