"""Loops in the shape of Megatron-Bridge's and ms-swift's, with no line of ours, survive losses."""

from dataclasses import replace

import pytest

from elaswave_plugin.config import STEP_PHASES
from tests.convoys import Convoy, convoys
from tests.faults import bridge_loop, swift_loop
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.test_own_loop import PP2, SEED, TP2
from tests.proofs import Kind, Promise, proves

BRIDGE = JobSpec(nproc=4, steps=6, script=bridge_loop.__file__, options=("--eval-interval=1", SEED))
SWIFT = replace(BRIDGE, script=swift_loop.__file__)
PHASES = (*STEP_PHASES, "evaluation")


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize("sizes", [(), TP2, PP2], ids=" ".join)
@pytest.mark.parametrize("shape", [BRIDGE, SWIFT], ids=["bridge", "swift"])
def test_try(run: Launch, reference: Reference, sizes: tuple[str, ...], shape: JobSpec) -> None:
    spec = replace(shape, options=(*BRIDGE.options, *sizes))
    whole = reference(spec)
    print(whole.output[-3000:])
    got = run(replace(spec, kills=("1@2:backward",)))
    print(got.output[-3000:])
    check_equal(got, whole)
