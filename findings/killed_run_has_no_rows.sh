#!/usr/bin/env bash
# An offline run of W&B whose process is killed within 15 s of its rows has written none of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet wandb==0.31.0
cat >"$folder/log.py" <<'PY'
import os
import signal
import time

import wandb

run = wandb.init(mode="offline", project="p", settings=wandb.Settings(silent=True))
for step in range(5):
    run.log({"loss": 1.0 / (step + 1)})
time.sleep(5)
os.kill(os.getpid(), signal.SIGKILL)
PY
cat >"$folder/show.py" <<'PY'
import os
import pathlib
import subprocess
import sys
import time

import wandb

print("wandb", wandb.__version__)
sizes = {}
for name, more in (
    ("as it is", {}),
    ("flushed each second", {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}),
):
    place = pathlib.Path(name)
    place.mkdir()
    done = subprocess.run([sys.executable, "../log.py"], cwd=place, env=os.environ | more)
    assert done.returncode == -9, done
    time.sleep(5)  # whoever writes for it has ended by then, or has had the time to write
    (file,) = place.glob("wandb/offline-run-*/run-*.wandb")
    sizes[name] = file.stat().st_size
    print(f"{name}: 5 rows logged, killed 5 s later, bytes in the run's file: {sizes[name]}")
assert sizes["as it is"] < 100 < sizes["flushed each second"], sizes
PY
cd "$folder"
"$folder/venv/bin/python" "$folder/show.py"
