"""A worker whose layers take longer than those of its peers is named, and nobody else."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import ROOT, check_equal
from tests.faults.test_clocks import SPEC

SLOW, SLOW_FROM = 1, 2
EMULATED = f"""
import os, runpy, time
runpy.run_path({str(ROOT / "benchmarks" / "emulated_compute.py")!r})["slow_down"](0.004)
from elaswave_plugin.runtime.loop import GuardedSteps
from megatron.core.transformer.transformer_layer import TransformerLayer
begin, forward = GuardedSteps.begin, TransformerLayer.forward
now = []
def note(self):
    begin(self)
    now[:] = [self.worker.completed]
def slowly(self, *args, **kwargs):
    if os.environ["ELASWAVE_SLOT"] == "{SLOW}" and now[0] >= {SLOW_FROM}:
        time.sleep(0.008)
    return forward(self, *args, **kwargs)
GuardedSteps.begin, TransformerLayer.forward = note, slowly
"""


@pytest.mark.slow
def test_a_slow_worker_is_named_within_five_steps(run: Launch, reference: Reference) -> None:
    spec = replace(SPEC, steps=8)
    slowed = run(replace(spec, sabotage=EMULATED))
    check_equal(slowed, reference(spec))
    (named,) = slowed.events("slow_worker")
    assert named["slot"] == SLOW and SLOW_FROM < named["step"] < SLOW_FROM + 5
    words = r"takes \d+\.\d\dx as long for a layer as worker 0, which has the same ones, in 4 steps"
    assert re.match(words, named["evidence"]) and named["ratio"] > 1.3
