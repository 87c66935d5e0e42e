#!/usr/bin/env bash
# DeepSpeed's converter refuses what engine.save_checkpoint has written, unless one option is given.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 deepspeed==0.19.8 numpy setuptools
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions" PATH="$folder/venv/bin:$PATH"
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export MASTER_PORT
cat >"$folder/save.py" <<'PY'
import deepspeed
import torch

config = {
    "train_batch_size": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
engine.backward(loss)
engine.step()
engine.save_checkpoint("saved", tag="one")
PY
cat >"$folder/show.py" <<'PY'
import subprocess
import sys

import deepspeed
import torch

print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
CONVERT = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
codes = {}
for option in ([], ["--inject_missing_state"]):
    given = ["--input_folder", "saved/one", "--output_folder", f"saved/one_universal{len(option)}"]
    done = subprocess.run([*CONVERT, *given, *option], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1] if done.returncode else "converted"
    codes[tuple(option)] = done.returncode
    print(f"ds_to_universal {' '.join(option)}: exit code {done.returncode}, {last}")
    if not option:
        assert done.returncode and "universal_checkpoint_info" in last, last
assert list(codes.values())[1] == 0, codes
PY
cd "$folder"
"$folder/venv/bin/python" -W ignore "$folder/save.py" >"$folder/out" 2>&1 || { tail -5 "$folder/out"; exit 2; }
"$folder/venv/bin/python" -W ignore "$folder/show.py" 2>/dev/null
