"""A job that was launched with a reserve grows beyond its launch, bit for bit as one that did not.

The reference is launched without a reserve: neither the number of workers nor the room for more
enters what is computed.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.ipc.address_file import read_addresses
from tests.faults.conftest import Grown, Launch, Reference
from tests.faults.growth import grow, widths, without_reserve
from tests.faults.harness import (
    JobSpec,
    Zygote,
    check_equal,
    check_survived,
    max_relative_difference,
)
from tests.faults.matrix import OPTIONS
from tests.faults.test_bad_input import check_refused, check_silent_otherwise
from tests.faults.test_join import LATER, entered, last_ranks
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

GROWS = JobSpec(steps=10, dump="last", launcher=("--reserve=1",), awaits=((4, 1),))


@proves(Kind.JOIN, Promise.EQUAL)
@pytest.mark.parametrize(
    "options", [(), *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS)], ids=str
)
def test_a_fifth_worker_joins_a_job_of_four(
    grown: Grown, tmp_path: Path, options: tuple[str, ...]
) -> None:
    spec = replace(GROWS, options=options)
    run = grown(spec)
    assert entered(run) == [(4, 1)]
    assert widths(run) == [4, 5] and last_ranks(run) == [0, 1, 2, 3, 4]
    assert read_addresses(tmp_path) == []
    # Nobody's work is thrown away, and the newcomer has a part of it.
    assert {e["restored_step"] for e in run.events("recovered") if e["newcomers"]} == {5}
    assert {e["slot"] for e in run.files.ledger if e["step"] == 9} == {0, 1, 2, 3, 4}


@proves(Kind.JOIN_LOSS, Promise.EQUAL, victim="2", moment="2:backward")
@pytest.mark.slow
def test_a_job_shrinks_is_whole_again_and_grows(grown: Grown) -> None:
    """4 -> 3 -> 4 -> 5."""
    spec = replace(
        GROWS,
        steps=12,
        respawn=10,
        kills=("2@2:backward",),
        awaits=((4, 1), (6, 2)),
        sabotage=LATER.format(slot=4),
    )
    run = grown(spec)
    assert entered(run) == [(2, 1), (4, 1)]
    assert widths(run) == [4, 3, 4, 5] and last_ranks(run) == [0, 1, 2, 3, 4]


@proves(Kind.JOIN_LOSS, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 2, 3])
def test_a_worker_beyond_the_launch_takes_over_a_replica(grown: Grown, slot: int) -> None:
    """4 -> 3 -> 4 workers: as many as at the launch, and others, whose ranks are not its replicas'.

    The trainer that is lost does not come back, but its node keeps the slot.
    """
    spec = replace(GROWS, kills=(f"{slot}@2:backward",))
    run = grown(spec)
    assert entered(run) == [(4, 1)]
    assert widths(run) == [4, 3, 4]
    assert last_ranks(run) == [one for one in range(5) if one != slot]


@proves(Kind.JOIN_LOSS, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "reduce", "optimizer", "gather"])
def test_the_worker_beyond_the_launch_is_lost(grown: Grown, phase: str) -> None:
    """4 -> 5 -> 4, and it is started again: 5."""
    spec = replace(GROWS, steps=14, respawn=1, kills=(f"4.1@7:{phase}",), awaits=((4, 1), (10, 2)))
    run = grown(spec)
    assert entered(run) == [(4, 1), (4, 2)]
    assert widths(run) == [4, 5, 4, 5]


@proves(Kind.JOIN_LOSS, Promise.EQUAL)
@pytest.mark.parametrize("slot", sampled([0, 3]))
def test_a_worker_of_a_grown_job_is_lost(grown: Grown, slot: int) -> None:
    """4 -> 5 -> 4 without one of the launch, and nobody comes back."""
    spec = replace(GROWS, kills=(f"{slot}@7:backward",))
    run = grown(spec)
    assert widths(run) == [4, 5, 4] and 4 in last_ranks(run) and slot not in last_ranks(run)


@proves(Kind.NEWCOMER, Promise.EQUAL, victim="4.1", moment="0:move")
@pytest.mark.slow
def test_a_newcomer_beyond_the_launch_dies_on_its_way_in(grown: Grown) -> None:
    spec = replace(GROWS, steps=12, respawn=10, kills=("4.1@0:move",), awaits=((4, 1), (7, 2)))
    run = grown(spec)
    assert entered(run) == [(4, 2)]
    assert last_ranks(run) == [0, 1, 2, 3, 4]


@proves(Kind.JOIN, Promise.EQUAL)
@pytest.mark.slow
def test_a_job_of_two_doubles(grown: Grown) -> None:
    # Once one of them asks to be let in, the other comes after the next step.
    spec = replace(GROWS, nproc=2, launcher=("--reserve=2",), awaits=((4, 1), (6, 2)))
    run = grown(spec, joiners=2)
    assert sorted(entered(run)) == [(2, 1), (3, 1)]
    assert last_ranks(run) == [0, 1, 2, 3]


# The node that leads is gone once the job has grown.
LOSE_LEADER = """
import json, os, signal
from elaswave_plugin.recovery.phases import Phases
enter = Phases.enter
def die(self, phase):
    if self._slot == 0 and (self.step, phase) == (7, "backward"):
        lines = open(self._events.path).read().splitlines()
        started = [e for e in map(json.loads, lines) if e["kind"] == "agent_started"]
        (pid,) = [e["guardian_pid"] for e in started if e["node"] == 0]
        os.kill(pid, signal.SIGKILL)
    enter(self, phase)
Phases.enter = die
"""


@proves(Kind.JOIN_LOSS, Promise.EQUAL)
@pytest.mark.slow
def test_the_leader_of_a_grown_job_is_lost(grown: Grown) -> None:
    """The next leader knows the slots of the reserve, too: one is left."""
    spec = replace(GROWS, launcher=("--reserve=2",), sabotage=LOSE_LEADER)
    run = grown(spec)
    assert widths(run) == [4, 5, 4] and sorted(last_ranks(run)) == [1, 2, 3, 4]
    assert [e["by"] for e in run.events("leader_elected")] == [1]


@proves(Kind.JOIN_LOSS, Promise.CLOSE)
def test_fast_mode_grows_with_losses_close_by(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(GROWS, consistency="fast")
    run = grow(spec, zygote=zygote, data=data, directory=tmp_path)
    undisturbed = reference(without_reserve(spec))
    check_survived(run)
    assert widths(run) == [4, 5]
    assert max_relative_difference(run, undisturbed) <= 1e-6
    # Negative control: the sums are really made in another order.
    assert run.trace() != undisturbed.trace()


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.slow
def test_a_reserve_changes_nothing_by_itself(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=("1@3:backward",))
    check_equal(run(replace(spec, launcher=("--reserve=3",))), reference(spec))


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_reserve_that_cannot_be_used_is_refused(run: Launch) -> None:
    refused = run(JobSpec(launcher=("--reserve=5",), dump="never"))
    seen = "4 replicas and a --reserve of 5 workers make stages of up to 9 replicas for 8"
    check_refused(refused, seen, "at most 4 or a larger global batch")
    check_silent_otherwise(refused)
