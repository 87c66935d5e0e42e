#!/usr/bin/env bash
# The deepspeed command on one node ends at SIGTERM, and its workers hear nothing of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'touch "$folder/end"; sleep 1; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
"$folder/venv/bin/python" -m pip install --quiet deepspeed==0.19.8 setuptools
cat >"$folder/worker.py" <<'PY'
import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[-1]), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (folder / f"heard{rank}").touch())
(folder / f"ready{rank}").write_text(str(os.getpid()))
end_s = time.monotonic() + 60
while time.monotonic() < end_s and not (folder / "end").exists():
    time.sleep(0.1)
PY
cat >"$folder/show.py" <<'PY'
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

folder = Path(sys.argv[1])
print("deepspeed", version("deepspeed"), "torch", version("torch"))
command = ["--num_nodes=1", "--num_gpus=2", folder / "worker.py", folder]
environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
program = Path(sys.executable).parent / "deepspeed"
process = subprocess.Popen([program, *command], env=environ, stdout=subprocess.DEVNULL)


def there(*names):
    return [name for name in names if (folder / name).exists()]


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


deadline_s = time.monotonic() + 60
while len(there("ready0", "ready1")) < 2:
    assert time.monotonic() < deadline_s and process.poll() is None, "no worker came"
    time.sleep(0.1)
pids = [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]
process.send_signal(signal.SIGTERM)
code = process.wait(20)
time.sleep(5)
heard, living = there("heard0", "heard1"), [pid for pid in pids if lives(pid)]
print(f"the command's exit code {code}; five seconds later {len(living)} of 2 workers live,")
print(f"and {len(heard)} have heard SIGTERM")
assert (code, len(living), len(heard)) == (-signal.SIGTERM, 2, 0)
PY
"$folder/venv/bin/python" -W ignore "$folder/show.py" "$folder" 2>"$folder/errors" || {
    cat "$folder/errors" >&2
    exit 1
}
