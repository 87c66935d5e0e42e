"""Numbers that a rehearsal names: losses of evaluations, and what who came back has otherwise."""

from pathlib import Path

import pytest

from tests.deepspeed import hf_runs
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults import own_scripts
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse

pytestmark = [pytest.mark.timeout(540), pytest.mark.slow]

EVALUATES = ("--eval-interval=2", "--eval-iters=1")
# A mean by the workers that are left, in evaluations only.
BY_WIDTH = """value = total / tokens
    if not torch.is_grad_enabled():
        value = value / torch.distributed.get_world_size()
    return total / tokens, value.detach()"""
COUNTS = (
    own_scripts.before_model(
        "class Count:\n    def __init__(self):\n        self.seen = 0\n\n\nCOUNT = Count()\n\n\n"
    ),
    own_scripts.in_body("        COUNT.seen += 1\n"),
)


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_a_validation_loss_that_follows_the_workers_is_named(
    rehearse: Rehearse, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.reports(BY_WIDTH))
    spec = JobSpec(nproc=3, steps=20, global_batch=6, script=script, options=EVALUATES)
    found = rehearse(spec, runs=("losses",))
    assert found.exit_code == 1, found.output
    assert (found.first["kind"], found.first["name"]) == ("result", "of evaluation")
    assert len(found.first["numbers"]) == 2


@proves(Kind.RETURN, Promise.NAMED)
def test_a_count_that_begins_again_is_named_though_all_is_equal(
    rehearse: Rehearse, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, *COUNTS)
    spec = JobSpec(nproc=3, steps=20, global_batch=6, script=script, options=EVALUATES)
    found = rehearse(spec, runs=("returns",))
    assert found.exit_code == 0, found.output
    print(found.output)
    (run,) = found.verdict["runs"]
    assert [one["name"] for one in run["numbers_of_newcomers"]] == ["COUNT.seen"]
    assert "COUNT.seen is 0 before step" in found.output
    assert "train_gpt.py:" in found.output


@proves(Kind.RETURN, Promise.NAMED)
def test_the_counters_of_a_callback_are_named_though_all_is_equal(
    rehearse_engine: Rehearse,
) -> None:
    """Rank 0 comes back with a callback of which nothing is known but that the Trainer has it."""
    spec = hf_runs.spec_of(nproc=2, steps=20, global_batch=4, options=("--evaluate=2",))
    found = rehearse_engine(spec, runs=("returns",))
    assert found.exit_code == 0, found.output
    print(found.output)
    (run,) = found.verdict["runs"]
    assert any("callbacks" in one["name"] for one in run["numbers_of_newcomers"])


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_a_validation_loss_that_follows_the_workers_is_named_in_fast_mode(
    rehearse_engine: Rehearse,
) -> None:
    """Though that of the planned departure follows them alike: it is made after step 3."""
    script, options = str(SCRIPTS / "evaluating.py"), ("--every=3", "--by-launch")
    spec = EngineSpec(script=script, nproc=3, steps=20, global_batch=12, options=options)
    found = rehearse_engine(spec, runs=("losses",))
    assert found.exit_code == 1, found.output
    assert (found.first["kind"], found.first["name"]) == ("result", "of evaluation")
    one, undisturbed = map(float, found.first["numbers"])
    assert one == pytest.approx(undisturbed * 2 / 3, rel=0.01)
