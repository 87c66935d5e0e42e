"""Seals after every third step: a loss takes back up to as many, and all bits are the same."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.faults.test_seals_beside import SLOW
from tests.faults.test_snapshots import restored_steps
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STEPS = 9
EVERY_THIRD = ("--elaswave-snapshot-interval=3",)


def every_third(base: JobSpec, **changes: object) -> JobSpec:
    """The job with more steps and fewer seals."""
    options = (*base.options, *EVERY_THIRD)
    return replace(base, steps=STEPS, options=options, **changes)  # type: ignore[arg-type]


def undisturbed(base: JobSpec) -> JobSpec:
    """The job that is its measure: with a seal after every step."""
    return replace(base, steps=STEPS)


# The job, the losses, the step to which each goes back.
CASES: list[tuple[JobSpec, tuple[str, ...], list[int]]] = [
    (JobSpec(), ("1@4:backward",), [3]),
    (JobSpec(), ("2@5:optimizer",), [3]),
    (JobSpec(), ("0@3:forward",), [3]),
    (JobSpec(), ("3@2:reduce",), [0]),
    (JobSpec(nodes=2), ("3@5:backward",), [3]),
    (JobSpec(), ("1@4:backward", "2@7:gather"), [3, 6]),
    # The second one strikes while what the first one took back is made again.
    (JobSpec(), ("1@5:backward", "2@3:replay"), [3]),
    (PP2_DP2, ("2@4:forward",), [3]),
    (TP2_PP2_DP2, ("5@5:backward",), [3]),
]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(("base", "kills", "restored"), sampled(CASES))
def test_a_loss_takes_back_what_no_seal_has(
    run: Launch,
    reference: Reference,
    base: JobSpec,
    kills: tuple[str, ...],
    restored: list[int],
) -> None:
    killed = run(every_third(base, kills=kills))
    check_equal(killed, reference(undisturbed(base)))
    assert sorted(restored_steps(killed)) == sorted(set(restored))


@proves(Kind.LEAVE, Promise.EQUAL, victim="2", moment="4")
def test_who_leaves_has_sealed_and_nothing_is_made_again(run: Launch, reference: Reference) -> None:
    left = run(every_third(JobSpec(), changes=("2@4",)))
    check_survived(left)
    assert left.trace() == reference(undisturbed(JobSpec())).trace()
    assert restored_steps(left) == {4}


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_who_comes_back_does_so_between_two_seals(run: Launch, reference: Reference) -> None:
    spec = every_third(JobSpec(), kills=("1@2:backward",), respawn=1, changes=("+1@5",))
    back = run(spec)
    check_equal(back, reference(undisturbed(JobSpec())))
    # The loss goes back to the first seal, and for the return all have sealed where they stand.
    assert restored_steps(back) == {0, 5}
    assert [event["step"] for event in back.events("entered")] == [5]


# An update that waits long for its seal.
LATE = SLOW.replace("0.03", "0.1")


@proves(Kind.KILL, Promise.EQUAL)
def test_seals_that_steps_wait_for_become_fewer(run: Launch, reference: Reference) -> None:
    steps = 24
    slowed = run(JobSpec(steps=steps, kills=("1@22:backward",), sabotage=LATE))
    check_equal(slowed, reference(JobSpec(steps=steps)))
    # On a busy machine they may become fewer twice.
    _, *changed, fewer, lost = slowed.events("view_committed")
    for one in (*changed, fewer):
        assert one["reason"].startswith("steps wait for snapshots: one after every ")
    every = int(fewer["reason"].split()[-4])
    begins = {event["epoch"]: event["restored_step"] for event in slowed.events("recovered")}
    # What the job does by itself costs no step; the loss goes back to a seal of the new interval.
    assert every > 1 and 8 <= begins[fewer["epoch"]] < 22
    newest = max(step for step in (*range(0, 23, every), begins[fewer["epoch"]]) if step <= 22)
    assert begins[lost["epoch"]] == newest
