"""After a loss, buckets of a lost replica's micro-batches leave during the backward pass."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.proofs import Kind, Promise, proves

# At its end, a worker says how many buckets left within a pass, and how many behind it.
COUNTED = """
import atexit
from elaswave_plugin.adapters.megatron.step.reduction import GradientReduction
send_off, counts = GradientReduction._send_off, [0, 0]
def counted(reduction, bucket, departure):
    counts[reduction._departure is None] += 1
    send_off(reduction, bucket, departure)
GradientReduction._send_off = counted
atexit.register(lambda: print("left within a pass", counts[0], "behind it", counts[1], flush=True))
"""
SMALL_BUCKETS = ("--ddp-bucket-size", "20000")


def left(run: Outcome) -> tuple[int, int]:
    """The buckets of all workers that left within a pass, and behind it."""
    told = re.findall(r"left within a pass (\d+) behind it (\d+)", run.output)
    assert told, run.output[-3000:]
    return sum(int(one) for one, _ in told), sum(int(other) for _, other in told)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(kills=("1@2:forward",)),
        replace(PP2_DP2, nproc=8, global_batch=16, kills=("1@2:backward",)),
    ],
    ids=["dp4", "pp2-dp4"],
)
def test_buckets_leave_as_the_pass_completes_them(
    run: Launch, reference: Reference, spec: JobSpec
) -> None:
    spec = replace(spec, options=(*spec.options, *SMALL_BUCKETS), sabotage=COUNTED)
    killed = run(spec)
    check_equal(killed, reference(replace(spec, kills=())))
    within, behind = left(killed)
    # The first one of a layout shows how many gradients a pass makes.
    assert within > 2 * behind > 0, (within, behind)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:forward")
def test_without_overlap_they_leave_behind_it(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=("1@2:forward",), options=("--no-overlap-grad-reduce",), sabotage=COUNTED)
    killed = run(spec)
    check_equal(killed, reference(replace(spec, kills=())))
    within, behind = left(killed)
    assert not within and behind
