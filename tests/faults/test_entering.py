"""The only worker that knows the script's loop is lost while another one enters."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.test_join import entered
from tests.faults.test_own_scripts import averages
from tests.proofs import Kind, Promise, proves

TWO = JobSpec(nproc=2, steps=7, dump="last", respawn=5)
# The survivor dies when it has agreed to the view that lets the other one in.
KILLS, CHANGES = ("1@2:backward",), ("+1@4",)
TP2 = ("--tensor-model-parallel-size=2", "--sequence-parallel", "--calculate-per-token-loss")


@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0", moment="4:move")
def test_the_last_that_knows_the_loop_is_lost_while_another_enters(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """The average that the loop's body has made by then is not lost."""
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(TWO, script=script, kills=(*KILLS, "0@4:move"), changes=CHANGES)
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert entered(survived) == [(1, 1)]
    (found,) = averages(survived).values()
    assert found == averages(undisturbed)["average-0"]


@pytest.mark.slow
@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("phase", ["detect", "agree", "edit", "rebind", "verify", "gather"])
def test_it_is_lost_in_any_phase_of_that(run: Launch, reference: Reference, phase: str) -> None:
    spec = replace(TWO, kills=(*KILLS, f"0@4:{phase}"), changes=CHANGES)
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert len(entered(survived)) == 1


@pytest.mark.slow
@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0", moment="4:move")
def test_the_last_that_knows_a_part_of_the_model_is_lost(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Others are left, whose average is of another part."""
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(
        TWO,
        nproc=4,
        script=script,
        options=TP2,
        kills=("2@2:backward", "0@4:move"),
        changes=("+2@4",),
    )
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    # Worker 1 is without a place at the end; worker 3 was, until worker 2 came back.
    found, wanted = averages(survived), averages(undisturbed)
    assert [found[f"average-{n}"] for n in (2, 3)] == [wanted[f"average-{n}"] for n in (2, 3)]


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="2:backward")
def test_who_was_without_a_place_goes_on_with_what_the_others_keep(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Worker 3 is one of a TP group that cannot work, until worker 2 comes back."""
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(
        TWO, nproc=4, script=script, options=TP2, kills=("2@2:backward",), changes=("+2@4",)
    )
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert averages(survived) == averages(undisturbed)
