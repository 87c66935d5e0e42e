"""Without the section: what of ours is imported, exactly, at each point of a script."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.proofs import Kind, Promise, proves

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
seen["finders"] = [type(one).__module__ for one in sys.meta_path]
print(json.dumps(seen))
"""
AT_TORCH = ["elaswave_plugin", "elaswave_plugin.autoload", "elaswave_plugin.errors"]
AT_DEEPSPEED = [*AT_TORCH, "elaswave_plugin.deepspeed"]
AT_INITIALIZE = [
    *AT_DEEPSPEED,
    "elaswave_plugin.adapters",
    "elaswave_plugin.adapters.deepspeed",
    "elaswave_plugin.adapters.deepspeed.configuration",
    "elaswave_plugin.words",
]


def seen(*, autoload: bool) -> dict[str, Any]:
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=90,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@proves(Kind.NOTHING, Promise.SAME)
def test_what_is_imported_is_the_hook_and_no_more() -> None:
    found = seen(autoload=True)
    assert found["torch"] == sorted(AT_TORCH)
    assert found["deepspeed"] == sorted(AT_DEEPSPEED)
    assert found["initialize"] == sorted(AT_INITIALIZE)
    # DeepSpeed itself complains of the batch size. The hook stays: there are reloads.
    assert str(found["refused by"]).split(".")[0] in ("builtins", "deepspeed")
    assert list(found["finders"]).count("elaswave_plugin.autoload") == 1


@proves(Kind.NOTHING, Promise.SAME)
def test_torchs_own_switch_turns_it_off() -> None:
    found = seen(autoload=False)
    assert found["torch"] == found["deepspeed"] == found["initialize"] == []
