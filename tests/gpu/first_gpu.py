"""Runs --script on the first GPU whatever the worker's local rank, with kernels that repeat.

Several workers share a GPU so, as frameworks that take the GPU of LOCAL_RANK would not let them.
"""

import argparse
import os
import runpy
import sys

import torch


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", required=True)
    args, sys.argv[1:] = parser.parse_known_args()
    os.environ["LOCAL_RANK"] = "0"
    # They are read when CUDA begins, or when attention is chosen.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
