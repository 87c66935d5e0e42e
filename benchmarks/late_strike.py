"""Runs a script whose faults in a backward pass strike in the step's last one; counts passes.

    elaswave run ... benchmarks/late_strike.py MICROBATCHES SCRIPT ARGUMENTS...

``MICROBATCHES``: those of a replica. For measurements: by itself a fault strikes in the first pass.
Each forward pass of a worker is an event.
"""

import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from elaswave_plugin.recovery.phases import Phases


def strike_late(microbatches: int) -> None:
    """Let backward passes go by until the last one of the step, and note each forward pass."""
    fire, begun = Phases.fire, Counter[int]()

    def fire_late(phases: Phases, phase: str) -> None:
        if phase == "backward":
            begun[phases.step] += 1
        if phase == "forward":
            phases._events.emit("forward_pass", slot=phases._slot, step=phases.step)
        if phase != "backward" or begun[phases.step] >= microbatches:
            fire(phases, phase)

    replaced: Any = Phases
    replaced.fire = fire_late


def main(argv: list[str]) -> None:
    """MICROBATCHES SCRIPT ARGUMENTS: run the script."""
    microbatches, script, *arguments = argv
    strike_late(int(microbatches))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
