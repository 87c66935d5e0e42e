"""Mutants of `scripts/calls.py`: a call of `elaswave_plugin.deepspeed` is wrong; how each ends."""

from collections.abc import Iterator

from tests.deepspeed.call_replacements import CALLS_REPLACED
from tests.deepspeed.harness import ROOT, SCRIPTS
from tests.faults.mutants import Mutant, left_out, moved, replaced
from tests.faults.replacements import RAISES, TRAINS

CALLS = SCRIPTS / "calls.py"
_LEFT_OUT = {
    1: (RAISES, "NameError: name 'elaswave' is not defined"),
    # torch's entry point has done it.
    2: (TRAINS, ""),
    3: (RAISES, "NameError: name 'engine' is not defined"),
    4: (RAISES, "NameError: name 'batches' is not defined"),
    5: (RAISES, "NameError: name 'mean' is not defined"),
}
_UP = {
    1: (TRAINS, ""),
    2: (TRAINS, ""),
    3: (TRAINS, ""),
    4: (RAISES, "cannot access local variable 'engine'"),
}
_DOWN = {
    1: (TRAINS, ""),
    2: (TRAINS, ""),
    3: (RAISES, "cannot access local variable 'engine'"),
    4: (TRAINS, ""),
    5: (RAISES, "cannot access local variable 'mean'"),
}


def call_mutants() -> Iterator[Mutant]:
    """All of them, by call."""
    text = CALLS.read_text()
    # They are run in another folder.
    text = text.replace("Path(__file__).resolve().parents[3]", f'Path("{ROOT}")')
    yield from left_out(text, _LEFT_OUT, {})
    yield from moved(text, _UP, _DOWN, {})
    yield from replaced(text, CALLS_REPLACED, {})
