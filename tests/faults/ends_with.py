"""Runs a script, and then the statement with which its last lines end."""

import runpy
import sys

# As scripts have it that name it at their top, before anything of ours is there.
from torch.distributed import destroy_process_group as destroyed_by_name

if __name__ == "__main__":
    statement, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    names = runpy.run_path(script, run_name="__main__")
    # The statement comes from a test of ours.
    exec(statement, {**names, "destroyed_by_name": destroyed_by_name})
