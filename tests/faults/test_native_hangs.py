"""Workers that hang while the others wait in native collectives: gloo's in the place of NCCL's."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import ROOT, JobSpec, check_equal, check_survived, hang_of
from tests.faults.test_native_groups import DP4, NATIVE
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

CASES = [
    (DP4, "1@4:forward:stop"),
    (DP4, "0@4:backward:loop"),
    (DP4, "2@4:forward:gil"),
    (NATIVE, "5@4:forward:stop"),
    (NATIVE, "2@4:backward:loop"),
    (NATIVE, "0@4:forward:gil"),
]


@proves(Kind.HANG, Promise.EQUAL)
@pytest.mark.parametrize(("spec", "hang"), sampled(CASES))
def test_a_hang_behind_native_collectives_is_found(
    run: Launch, reference: Reference, spec: JobSpec, hang: str
) -> None:
    hung = run(replace(spec, kills=(hang,)))
    check_equal(hung, reference(hung.spec))
    found = hang_of(hung)
    assert (found["slot"], found["phase"]) == (int(hang[0]), hang.split(":")[1])
    assert found["waiting"]


# One worker makes its part of each communicator of step 4 and later 4 s late.
SLOW_TO_CONNECT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from elaswave_plugin.communicator.device.engine import DeviceEngine
from elaswave_plugin.communicator.device.communicator import Communicator
from tests.communicator.native_groups import GlooMaker
make, slow = GlooMaker.make, []
def make_late(self, store, name, rank, size):
    if store._links.slot == 1 and store._links.epoch > 1 and not slow:
        slow.append(name)
        time.sleep(4)
        print("slow to connect", name, flush=True)
    return make(self, store, name, rank, size)
GlooMaker.make = make_late
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST, victim="3", moment="4:forward")
def test_a_slow_connection_after_a_loss_kills_nobody(run: Launch, reference: Reference) -> None:
    slow = run(replace(DP4, kills=("3@4:forward",), sabotage=SLOW_TO_CONNECT))
    check_survived(slow)
    assert slow.output.count("slow to connect") == 1
    assert not slow.events("hang_found")
    assert len(slow.events("view_committed")) == 2
    assert slow.trace() == reference(DP4).trace()
