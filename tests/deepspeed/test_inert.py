"""Without the section: what of ours is imported, exactly, at each point of a script."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("deepspeed")

SCRIPT = """
import json, sys
def ours():
    return sorted(name for name in sys.modules if name.split(".")[0] == "elaswave_plugin")
import torch
seen = {"torch": ours()}
import deepspeed
seen["deepspeed"] = ours()
try:
    deepspeed.initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": -1})
except Exception as error:
    seen["refused by"] = type(error).__module__
seen["initialize"] = ours()
seen["watching"] = [one.watched.name for one in sys.meta_path if hasattr(one, "watched")]
print(json.dumps(seen))
"""
AT_TORCH = ["elaswave_plugin", "elaswave_plugin.autoload", "elaswave_plugin.errors"]
AT_DEEPSPEED = [*AT_TORCH, "elaswave_plugin.deepspeed"]
AT_INITIALIZE = [
    *AT_DEEPSPEED,
    "elaswave_plugin.adapters",
    "elaswave_plugin.adapters.deepspeed",
    "elaswave_plugin.adapters.deepspeed.configuration",
]


def seen(*, autoload: bool) -> dict[str, object]:
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=90,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_is_imported_is_the_hook_and_no_more() -> None:
    found = seen(autoload=True)
    assert found["torch"] == sorted(AT_TORCH)
    assert found["deepspeed"] == sorted(AT_DEEPSPEED)
    assert found["initialize"] == sorted(AT_INITIALIZE)
    # DeepSpeed itself complains of the batch size, and its finder has gone.
    assert str(found["refused by"]).split(".")[0] in ("builtins", "deepspeed")
    assert found["watching"] == ["megatron.training"]


def test_torchs_own_switch_turns_it_off() -> None:
    found = seen(autoload=False)
    assert found["torch"] == found["deepspeed"] == found["initialize"] == []
