"""SCRIPT ARGUMENTS...: runs a script whose DeepSpeed does not compile its CPU operation first."""

import runpy
import sys

import deepspeed


def main() -> None:
    """Run it as `python SCRIPT ARGUMENTS` would."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
