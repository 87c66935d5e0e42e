"""Weights and rates that train_step sets once, by a variable that no plugin sees, stay set."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STEP = "    def train_step():\n"
ONCE = STEP + (
    "        if job.iteration >= 2 and not HAS_SET:\n"
    "            HAS_SET.append(True)\n"
    "            for one in {what}:\n"
    "                {sets}\n"
)
SETS = {
    "rate": {"what": "optimizer.param_groups", "sets": "one['lr'] = 0.1 * one['lr']"},
    "weights": {"what": "model[0].parameters()", "sets": "one.data.mul_(0.9)"},
}
SPEC = JobSpec(nproc=3, steps=7, global_batch=6)
LOSSES = {
    "in that step": replace(SPEC, kills=("1@2:backward",)),
    "later, and who comes back": replace(
        SPEC, kills=("0@3:backward",), respawn=10, awaits=((5, 1),)
    ),
}


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", sampled(SETS))
def test_what_a_step_sets_once_stays_set(
    run: Launch, reference: Reference, tmp_path: Path, name: str, loss: str
) -> None:
    """Nor does a worker that has just come set it alone."""
    change = STEP, ONCE.format(**SETS[name])
    script = own_scripts.write(tmp_path, own_scripts.before_model("HAS_SET = []\n\n\n"), change)
    spec = replace(LOSSES[loss], script=script)
    check_equal(run(spec), reference(spec))
