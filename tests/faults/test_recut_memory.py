"""A new cut of the optimizer state takes the memory of the old one: both are never there."""

import re
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BF16 = JobSpec(options=("--bf16",), kills=("2@2:backward",))
# Says how many old tensors are gone when the new ones are about to be made, after KEPT.
COUNT = """
import os, torch
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
recut, masters_of, watched = FlatShard.recut, FlatShard._master_slices, []
KEPT = []
def watching(self, in_place=None):
    flat = [t for part in self._own() for t in part]
    watched[:] = [t.untyped_storage()._weak_ref() for t in flat]
    KEEP
    del flat
    recut(self, in_place)
def counting(self, sizes):
    gone = sum(torch.UntypedStorage._expired(one) for one in watched)
    os.write(1, b"gone %d of %d.\\n" % (gone, len(watched)))
    return masters_of(self, sizes)
FlatShard.recut, FlatShard._master_slices = watching, counting
"""
FREED = re.compile(r"gone (\d+) of (\d+)\.")


def counts(output: str) -> set[tuple[int, int]]:
    """Return what the cuts that had a state before them have said."""
    found = {(int(gone), int(all_)) for gone, all_ in FREED.findall(output)}
    return {one for one in found if one[1]}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "spec",
    sampled(
        [
            BF16,
            JobSpec(kills=("1@2:forward",)),
            JobSpec(nproc=4, options=PP2_DP2.options, kills=("3@2:backward",)),
        ]
    ),
    ids=["bf16", "fp32", "pp2"],
)
def test_the_old_state_is_gone_before_the_new_one_is_made(
    run: Launch, reference: Reference, spec: JobSpec
) -> None:
    survived = run(replace(spec, sabotage=COUNT.replace("KEEP", "")))
    check_equal(survived, reference(spec))
    found = counts(survived.output)
    assert found and all(gone == of for gone, of in found)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="2:backward")
def test_what_holds_on_to_the_old_state_is_seen(run: Launch) -> None:
    survived = run(replace(BF16, sabotage=COUNT.replace("KEEP", "KEPT[:] = flat")))
    found = counts(survived.output)
    assert found and all(gone == 0 for gone, _ in found)
