#!/usr/bin/env bash
# An unfinished DataLoader iterator with processes costs five seconds a process where a collection of cycles finds it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat >"$folder/show.py" <<'PY'
import gc
import time

import torch
from torch.utils.data import DataLoader


class Reader:
    """Holds an iterator, and may be part of a cycle, as what has a bound method of its own is."""

    def __init__(self, num_workers, in_cycle):
        self.batches = iter(DataLoader(range(64), batch_size=2, num_workers=num_workers))
        self.read = self.next if in_cycle else None

    def next(self):
        return next(self.batches)


def seconds(num_workers, in_cycle):
    reader = Reader(num_workers, in_cycle)
    reader.next()
    began = time.monotonic()
    del reader
    gc.collect()
    return time.monotonic() - began


print("torch", torch.__version__)
gc.disable()
for num_workers in (1, 2, 3):
    counted, collected = (seconds(num_workers, in_cycle) for in_cycle in (False, True))
    print(f"{num_workers} processes, to let go: {counted:.1f} s; as part of a cycle: {collected:.1f} s")
    assert counted < 4.5 and collected > 5 * num_workers
PY
"$folder/venv/bin/python" -W ignore "$folder/show.py"
