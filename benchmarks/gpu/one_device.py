"""Runs a script whose framework takes the GPU of LOCAL_RANK, on the first one, for every worker.

python benchmarks/gpu/one_device.py SCRIPT ARGUMENTS: several workers share a GPU, as DeepSpeed,
which has no setting for it, would not let them.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
