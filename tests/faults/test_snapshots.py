"""Damaged and lost snapshots: the ladder of own memory, a copy, an older step, a clean stop."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

FLIP = """
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET
from elaswave_plugin.recovery.state_keeper import StateKeeper
wait = StateKeeper.await_copies
def flip(self):
    wait(self)
    if self._member.slot == {slot} and self._sealed_step in {steps}:
        for step in {damaged}:
            self.pool._maps[step % 2][BODY_OFFSET + 1000] ^= 1
StateKeeper.await_copies = flip
"""


def restored_steps(run: object) -> set[int]:
    return {event["restored_step"] for event in run.events("recovered")}  # type: ignore[attr-defined]


def flipped(*, slot: int, damaged: tuple[int, ...], **changes: object) -> JobSpec:
    sabotage = FLIP.format(slot=slot, steps=(3,), damaged=damaged)
    spec = JobSpec(kills=("2@3:optimizer",), sabotage=sabotage)
    return replace(spec, **changes)  # type: ignore[arg-type]


@proves(Kind.DAMAGE, Promise.EQUAL)
def test_a_flipped_bit_is_not_used_where_another_node_has_a_copy(
    run: Launch, reference: Reference
) -> None:
    survived = run(flipped(slot=1, damaged=(3,), nodes=2))
    check_survived(survived)
    assert restored_steps(survived) == {3}
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.DAMAGE, Promise.OLDER)
def test_a_flipped_bit_in_the_memory_of_one_node_falls_back_to_the_older_step(
    run: Launch, reference: Reference
) -> None:
    """Within a node there is one memory, and no copy."""
    survived = run(flipped(slot=1, damaged=(3,)))
    check_survived(survived)
    assert restored_steps(survived) == {2}
    assert survived.trace() == reference(JobSpec()).trace()


# What an agent that does not deliver looks like, to worker 0.
UNDELIVERED = """
import os, time
from elaswave_plugin.errors import LinkError
from elaswave_plugin.snapshot.fetch import Fetcher
fetch, done = Fetcher.fetch, []
def undelivered(self, **request):
    if done or os.environ["RANK"] != "0":
        return fetch(self, **request)
    done.append(True)
    deadline_s = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline_s:
        self._check()
        time.sleep(0.01)
    raise LinkError("nothing came")
Fetcher.fetch = undelivered
"""


@proves(Kind.DAMAGE, Promise.GOES_ON, victim="2", moment="3:backward")
def test_who_waits_for_a_shard_does_not_hang(run: Launch, reference: Reference) -> None:
    """It gives up by itself, and reads another copy; the limit of a hang is no longer than that."""
    options = ("--elaswave-transfer-timeout-s=1", "--elaswave-hang-timeout-s=1")
    survived = run(JobSpec(kills=("2@3:backward",), sabotage=UNDELIVERED, options=options, nodes=2))
    check_survived(survived)
    assert not survived.events("hang_found")
    assert max(event["phases_s"]["move"] for event in survived.events("recovered")) > 1
    assert survived.trace() == reference(JobSpec()).trace()


# An agent that hears late of a worker's first snapshot, as on a busy machine.
LATE_SEAL = """
import os, threading
from elaswave_plugin.ipc.frames import Sealed
from elaswave_plugin.trainer.member import Member
sealed = Member.sealed
def late(self, record, copy_to):
    if os.environ["RANK"] == "3" and record.step == 0:
        send, self._link.send = self._link.send, lambda frame: None
        sealed(self, record, copy_to)
        self._link.send = send
        threading.Timer(0.5, send, [Sealed(record=record, copy_to=tuple(copy_to))]).start()
    else:
        sealed(self, record, copy_to)
Member.sealed = late
"""


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="0:data")
def test_a_loss_in_the_first_step_finds_a_job_that_can_go_on(
    run: Launch, reference: Reference
) -> None:
    """Nobody begins it before all agents know of all first snapshots."""
    survived = run(JobSpec(kills=("1@0:data",), sabotage=LATE_SEAL))
    check_survived(survived)
    assert restored_steps(survived) == {0}
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.DAMAGE, Promise.OLDER)
def test_a_flipped_bit_without_a_copy_falls_back_to_the_older_step(
    run: Launch, reference: Reference
) -> None:
    options = ("--elaswave-snapshot-copies=0",)
    survived = run(flipped(slot=1, damaged=(3,), options=options))
    check_survived(survived)
    assert restored_steps(survived) == {2}
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.DAMAGE, Promise.OLDER, moment="6:optimizer")
@pytest.mark.parametrize(
    ("base", "returns", "victim"),
    sampled([(JobSpec(), 2, 0), (PP2_DP2, 2, 0), (PP2_DP2, 0, 1), (PP2_VPP2_DP2, 2, 0)]),
)
def test_who_came_in_a_step_redoes_the_one_before_as_well(
    run: Launch, reference: Reference, base: JobSpec, returns: int, victim: int
) -> None:
    """Its script's state begins with the step that it entered; the others have the older one."""
    base = replace(base, steps=9)
    changes = (f"{returns}@2", f"+{returns}@6")
    damage = FLIP.format(slot=victim, steps=(6,), damaged=(6,))
    survived = run(
        replace(base, changes=changes, kills=(f"{victim}@6:optimizer",), sabotage=damage, respawn=1)
    )
    check_survived(survived)
    assert next(event["step"] for event in survived.events("entered")) == 6
    # The victim may be back before the end, for which nobody goes back.
    back = f"{victim}.1"
    recovered = [one for one in survived.events("recovered") if back not in one["newcomers"]]
    assert {one["restored_step"] for one in recovered} == {2, 5}
    assert survived.trace() == reference(base).trace()


@proves(Kind.DAMAGE, Promise.STOPS)
def test_flipped_bits_everywhere_stop_the_job_and_name_the_shard(run: Launch) -> None:
    options = ("--elaswave-snapshot-copies=0",)
    stopped = run(flipped(slot=1, damaged=(2, 3), options=options))
    assert stopped.returncode == 1
    assert "state was lost with all its copies (step 3: shards [1] of 4" in stopped.output
    assert "Traceback" not in stopped.output
    assert not stopped.orphans


@proves(Kind.NODE, Promise.EQUAL, victim="1")
def test_a_lost_node_is_restored_from_the_copy(run: Launch, reference: Reference) -> None:
    survived = run(JobSpec(nodes=4, lost_nodes=(1,)))
    check_survived(survived)
    assert len(survived.events("view_committed")) == 2
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.NODE, Promise.EQUAL, victim="2 3")
def test_the_first_of_two_nodes_goes_on_without_the_other(
    run: Launch, reference: Reference
) -> None:
    """All that the lost node had in memory lies on this one as well."""
    survived = run(JobSpec(nodes=2, lost_nodes=(1,)))
    check_equal(survived, reference(JobSpec()))
    assert survived.events("view_committed")[-1]["ranks"] == [0, 1]


@proves(Kind.NODE, Promise.EQUAL, victim="0")
def test_the_leaders_node_is_restored_from_the_copy(run: Launch, reference: Reference) -> None:
    survived = run(JobSpec(nodes=4, lost_nodes=(0,)))
    check_survived(survived)
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.COPIES, Promise.STOPS, victim="2 1")
def test_two_lost_nodes_need_two_copies(run: Launch, reference: Reference) -> None:
    stopped = run(JobSpec(nodes=4, lost_nodes=(2, 1)))
    assert stopped.returncode == 1
    assert "state was lost with all its copies" in stopped.output
    copies = ("--elaswave-snapshot-copies=2",)
    survived = run(JobSpec(nodes=4, lost_nodes=(2, 1), options=copies))
    check_survived(survived)
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.KILL_AT_START, Promise.REQUEUE, victim="1", moment="2:backward")
def test_without_snapshots_a_loss_stops_the_job_and_asks_for_a_requeue(run: Launch) -> None:
    stopped = run(
        JobSpec(kills=("1@2:backward",), options=("--elaswave-snapshots=off",), dump="never")
    )
    assert stopped.returncode == 75
    assert "worker 1: killed by SIGKILL" in stopped.output
    assert "snapshot" in stopped.output
    assert not stopped.orphans


SCRIBBLE = """
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
pause = MegatronFramework.pause
def scribble(self):
    pause(self)
    if self._worker.slot == 1 and self._worker.completed == 3:
        self.chunks[0].buffers[0].param_data[0] += 1
MegatronFramework.pause = scribble
"""


@proves(Kind.DAMAGE, Promise.EQUAL, victim="2", moment="3:backward")
def test_weights_in_place_that_differ_between_replicas_are_read_anew(
    run: Launch, reference: Reference
) -> None:
    survived = run(JobSpec(kills=("2@3:backward",), sabotage=SCRIBBLE))
    check_survived(survived)
    assert [event["in_place"]["weights"] for event in survived.events("recovered")] == [0] * 3
    assert survived.trace() == reference(JobSpec()).trace()
