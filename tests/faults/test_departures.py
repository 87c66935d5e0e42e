"""After a loss, buckets of a lost replica's micro-batches leave during the backward pass."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.proofs import Kind, Promise, proves

# At its end, a worker says how many buckets left within a pass and behind it, and of how many
# contributions the latter were.
COUNTED = """
import atexit
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
send_off, counts, late = GradientReduction._send_off, [0, 0], []
def counted(reduction, bucket, departure):
    is_late = reduction._departure is None
    counts[is_late] += 1
    if is_late and departure not in late:
        late.append(departure)
    send_off(reduction, bucket, departure)
GradientReduction._send_off = counted
def tell():
    print("left within a pass", counts[0], "behind it", counts[1], "of", len(late), flush=True)
atexit.register(tell)
"""
SMALL_BUCKETS = ("--ddp-bucket-size", "20000")


def left(run: Outcome) -> list[tuple[int, int, int]]:
    """By worker that sent any: buckets within a pass, behind it, contributions of the latter."""
    told = re.findall(r"left within a pass (\d+) behind it (\d+) of (\d+)", run.output)
    counts = [(int(within), int(behind), int(late)) for within, behind, late in told]
    found = [one for one in counts if any(one)]
    assert found, run.output[-3000:]
    return found


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
    counts = left(killed)
    # The first one shows how many gradients a pass makes.
    assert {late for *_, late in counts} == {1}, counts
    assert all(within for within, *_ in counts), counts


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:forward")
def test_without_overlap_they_leave_behind_it(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=("1@2:forward",), options=("--no-overlap-grad-reduce",), sabotage=COUNTED)
    killed = run(spec)
    check_equal(killed, reference(replace(spec, kills=())))
    assert all(behind and not within for within, behind, _ in left(killed))
