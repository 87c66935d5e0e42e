"""Runs a script after a statement that breaks a part of the product: for negative controls."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    statement, script, *arguments = sys.argv[1:]
    # Statements of ours may name parts of the checkout that are not installed.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    exec(statement)  # the statement comes from a test of ours
    sys.argv = [script, *arguments]
    # The script's own modules lie beside it.
    del sys.path[0]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
