"""The only worker that knows the script's loop is lost while another one enters."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.test_join import entered
from tests.faults.test_own_scripts import averages
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

TWO = JobSpec(nproc=2, steps=7, dump="last", respawn=5)
# The survivor dies when it has agreed to the view that lets the other one in.
KILLS, CHANGES = ("1@2:backward",), ("+1@4",)
PP2 = ("--pipeline-model-parallel-size=2",)
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
    check_first(survived, undisturbed)


def check_first(survived: Outcome, undisturbed: Outcome) -> None:
    """Worker 1 came back first, and has the average; on a busy machine worker 0 is back as well."""
    assert entered(survived)[0] == (1, 1)
    wanted, found = averages(undisturbed)["average-0"], averages(survived)
    assert found and all(one == wanted for one in found.values())


@pytest.mark.slow
@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("phase", ["detect", "agree", "edit", "rebind", "verify", "gather"])
def test_it_is_lost_in_any_phase_of_that(run: Launch, reference: Reference, phase: str) -> None:
    spec = replace(TWO, kills=(*KILLS, f"0@4:{phase}"), changes=CHANGES)
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived)[0] == (1, 1)


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


# Another one waits to be let in behind step 4, in which the last worker is lost: before the step's
# update, or once that is sealed, with what the loop's body makes then not done.
IN_STEP = ("4:data", "4:backward", "4:optimizer", "4:snapshot", "4:body", "5:evaluation", "5:save")


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("place", sampled(IN_STEP))
def test_the_last_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Reference, tmp_path: Path, place: str
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(TWO, script=script, awaits=((4, 1),))
    options = ("--eval-interval=1",) if "evaluation" in place else ()
    if "save" in place:
        options = (f"--save={tmp_path / 'saved'}", "--save-interval=1")
    survived = run(replace(spec, kills=("1@2:backward", f"0@{place}"), options=options))
    check_goes_on(survived, reference(spec))


def check_goes_on(survived: Outcome, undisturbed: Outcome) -> None:
    """It has gone back to step 4, and all is equal, also the average that the body makes."""
    check_equal(survived, undisturbed)
    check_first(survived, undisturbed)
    first = next(one for one in survived.events("recovered") if one["newcomers"])
    assert first["restored_step"] == 4


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("place", ["5:backward", "5:body"])
def test_the_last_is_lost_where_every_other_step_is_sealed(
    run: Launch, reference: Reference, tmp_path: Path, place: str
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(TWO, script=script, awaits=((5, 1),))
    options = ("--elaswave-snapshot-interval=2",)
    survived = run(replace(spec, kills=("1@2:backward", f"0@{place}"), options=options))
    check_goes_on(survived, reference(spec))


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("sizes", [PP2, TP2])
@pytest.mark.parametrize("place", ["4:backward", "4:snapshot", "4:body"])
def test_the_last_of_a_stage_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Reference, tmp_path: Path, place: str, sizes: tuple[str, ...]
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(TWO, nproc=4, script=script, awaits=((4, 1),), options=sizes)
    kills = ("1@2:backward", "3@2:backward", f"2@{place}")
    if sizes == TP2:
        kills = ("2@2:backward", f"1@{place}")
    survived, undisturbed = run(replace(spec, kills=kills)), reference(spec)
    check_equal(survived, undisturbed)
    wanted = list(averages(undisturbed).values())
    assert all(found in wanted for found in averages(survived).values())


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0")
def test_the_last_is_lost_while_another_waits_on_another_node(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """State and notes come from the node of who was lost."""
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    spec = replace(TWO, nodes=2, script=script, awaits=((4, 1),))
    survived = run(replace(spec, kills=("1@2:backward", "0@4:body")))
    check_goes_on(survived, reference(spec))


@pytest.mark.slow
@proves(Kind.COPIES, Promise.STOPS, victim="0")
def test_with_its_node_the_only_state_is_lost(run: Launch) -> None:
    """Nobody else held what it has sealed since it was alone."""
    spec = replace(TWO, nodes=2, kills=("1@1:backward",), awaits=((3, 1),), lost_nodes=(0,))
    ended = run(spec)
    assert ended.returncode == 1
    assert "no node with the training's state can be reached" in ended.output
