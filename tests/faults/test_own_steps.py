"""Scripts whose worker that comes back differs: it is sent away, and takes no survivor along."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.test_join import entered, last_ranks
from tests.proofs import Kind, Promise, proves

SPEC = JobSpec(nproc=3, steps=8, global_batch=6, dump="last", respawn=5)
BACK = {"kills": ("1@2:backward",), "changes": ("+1@5",)}
_LOOP = "    for iteration, report in job.train("
_SAVES = (
    "        if args.save and args.save_interval and (iteration + 1) % args.save_interval == 0:\n"
    '            job.run(save, phase="save")  # [elastic] 10\n'
)
# A count of its own, of which the worker that comes back has not seen the beginning.
COUNTS = (_LOOP, f"    mine = 0\n{_LOOP}")
COUNTS_EACH = (_SAVES, "        mine += 1\n")
_FINAL = """{0}if mine == args.train_iters:
{0}    print_rank_0(f"final {{job.evaluate(evaluate):.6f}}")
{0}    job.run(save, phase="save")
"""
_WRITES = "{0}if mine == args.train_iters:\n{0}    job.run(save, phase='save')\n"
IN_THE_LAST_STEP = _FINAL.format(8 * " ")
AFTER_TRAINING = _FINAL.format(4 * " ")
ONLY_A_SAVE = _WRITES.format(8 * " ")
TOLD = "count those that the job has made (the iteration that job.train yields, or job.iteration)"


def check_goes_on(run: Outcome, undisturbed: Outcome) -> None:
    """The two that were there end as they would have without any loss."""
    check_equal(run, undisturbed)
    assert entered(run) == [(1, 1)]
    assert last_ranks(run) == [0, 2]


def at_the_end(folder: Path, code: str) -> JobSpec:
    """A script that does this by a count of its own."""
    script = own_scripts.write(folder, COUNTS, (COUNTS_EACH[0], COUNTS_EACH[1] + code))
    return replace(SPEC, script=script, options=(f"--save={folder / 'saved'}",))


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_who_counts_otherwise_in_the_last_step_takes_nobody_along(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    spec = at_the_end(tmp_path, IN_THE_LAST_STEP)
    undisturbed, survived = reference(spec), run(replace(spec, failing=(1,), **BACK))
    check_goes_on(survived, undisturbed)
    assert survived.output.count(TOLD) == 1
    assert survived.output.count("final ") == 1
    assert (tmp_path / "saved" / "iter_0000008" / "metadata.json").exists()


@pytest.mark.slow
@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_nor_after_the_training(run: Launch, reference: Reference, tmp_path: Path) -> None:
    spec = at_the_end(tmp_path, AFTER_TRAINING)
    undisturbed, survived = reference(spec), run(replace(spec, failing=(1,), **BACK))
    check_goes_on(survived, undisturbed)
    assert survived.output.count(TOLD) == 1


@pytest.mark.slow
@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_nor_where_it_ends_before_the_others_have_saved(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    """Its last barrier meets one of the save, so that it leaves as done."""
    spec = at_the_end(tmp_path, ONLY_A_SAVE)
    check_goes_on(run(replace(spec, **BACK)), reference(spec))
    assert (tmp_path / "saved" / "iter_0000008" / "metadata.json").exists()


@pytest.mark.slow
@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_who_comes_with_other_settings_is_told_which(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    sets = (
        '    if os.environ["ELASWAVE_INCARNATION"] != "0":\n'
        "        optimizer.param_groups[0]['warm'] = 0.5\n"
    )
    script = own_scripts.write(tmp_path, (_LOOP, sets + _LOOP))
    spec = replace(SPEC, script=script)
    awaited = replace(spec, kills=("1@2:backward",), awaits=((5, 1),), failing=(1,))
    survived = run(awaited)
    check_equal(survived, reference(spec))
    assert last_ranks(survived) == [0, 2]
    told = "in the settings of the optimizer's groups (warm of group 0: 0.5 here, nothing there)"
    assert survived.output.count(told) == 1
