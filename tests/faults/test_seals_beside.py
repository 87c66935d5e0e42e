"""Seals that are written beside the compute of the next step, as those of large shards are."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_snapshots import restored_steps
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BESIDE = """
from elaswave_plugin.recovery import state_keeper
state_keeper.BESIDE_BYTES = 0
"""
# As slow as those of gigabytes: a seal takes as long as the passes of a step, or longer.
SLOW = f"""{BESIDE}
import time
from elaswave_plugin.snapshot.host_copies import HostCopies
copy = HostCopies._copy
def slow(self, *given):
    for stop in copy(self, *given):
        time.sleep(0.03)
        yield stop
HostCopies._copy = slow
"""
# What the rule forbids: an update that does not wait for the seal of the step before, which takes
# longer than a step of a busy machine.
UNAWAITED = f"""{SLOW.replace("0.03", "0.3")}
from elaswave_plugin.recovery.state_keeper import StateKeeper
StateKeeper.finish_seal = lambda self: None
"""


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("base", "kill"),
    sampled(
        [
            (JobSpec(), "1@2:forward"),
            (JobSpec(), "0@3:backward"),
            (JobSpec(), "2@3:optimizer"),
            (JobSpec(nodes=2), "3@3:forward"),
            (PP2_DP2, "1@2:backward"),
            (PP2_DP2, "0@3:gather"),
        ]
    ),
)
def test_a_kill_beside_a_seal_changes_nothing(
    run: Launch, reference: Reference, base: JobSpec, kill: str
) -> None:
    check_equal(run(replace(base, kills=(kill,), sabotage=SLOW)), reference(base))


@proves(Kind.KILL, Promise.OLDER, victim="1", moment="3:snapshot")
def test_a_seal_that_was_not_complete_is_not_used(run: Launch, reference: Reference) -> None:
    """Two steps are made again where the victim's shard of the last one is nowhere whole."""
    survived = run(JobSpec(kills=("1@3:snapshot",), sabotage=BESIDE))
    check_equal(survived, reference(JobSpec()))
    assert restored_steps(survived) == {3}


@proves(Kind.HANG, Promise.EQUAL, victim="1", moment="3:snapshot")
def test_a_seal_that_hangs_is_found(run: Launch, reference: Reference) -> None:
    options = ("--elaswave-hang-start-timeout-s=4", "--elaswave-hang-timeout-s=2")
    hung = run(JobSpec(options=options, kills=("1@3:snapshot:loop",), sabotage=BESIDE))
    check_survived(hung)
    assert hung.trace() == reference(JobSpec()).trace()
    assert [one["slot"] for one in hung.events("hang_found")] == [1]


@proves(Kind.LEAVE, Promise.EQUAL, victim="2", moment="3")
def test_a_worker_that_leaves_has_sealed(run: Launch, reference: Reference) -> None:
    left = run(JobSpec(changes=("2@3",), sabotage=SLOW))
    check_survived(left)
    assert restored_steps(left) == {3}
    assert left.trace() == reference(JobSpec()).trace()


@proves(Kind.KILL, Promise.SEEN, victim="1", moment="3:optimizer")
def test_control_an_update_that_does_not_wait_is_seen(run: Launch, reference: Reference) -> None:
    broken = run(JobSpec(kills=("1@3:optimizer",), sabotage=UNAWAITED))
    assert broken.returncode != 0 or broken.trace() != reference(JobSpec()).trace()
