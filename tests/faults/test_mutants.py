"""No mutant of the example is silent: it trains right, says what to write, or fails once."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.mutant_ends import check_refused, check_told
from tests.faults.mutants import Mutant, mutants
from tests.faults.mutants_page import PAGE, page
from tests.faults.replacements import LESS, TRAINS
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SPEC = JobSpec(nproc=2, steps=4, global_batch=4)
MUTANTS = list(mutants())


def test_the_page_has_every_mutant() -> None:
    assert PAGE.read_text() == page(), "print it anew: python -m tests.faults.mutants_page"


@proves(Kind.WRONG_SCRIPT, Promise.TOLD, victim="1", moment="3:backward")
@pytest.mark.parametrize("mutant", sampled(MUTANTS), ids=map(str, MUTANTS))
def test_a_mutant_is_not_silent(
    run: Launch, reference: Reference, tmp_path: Path, mutant: Mutant
) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(mutant.script)
    options = tuple(one.replace("SAVED", str(tmp_path / "saved")) for one in mutant.options)
    trains = mutant.end == TRAINS
    spec = replace(
        SPEC,
        options=options,
        kills=("1@3:backward",),
        respawn=0 if trains or mutant.end == LESS else 10,
    )
    done = run(replace(spec, script=str(script)))
    if trains:
        check_equal(done, reference(SPEC))
    else:
        check_told(done, mutant.end, mutant.words)


# Where only the last stage has losses, and a stage may read no data.
OF_STAGES = [
    "6 a loader of one's own",
    "7 with Megatron's num_microbatches",
    "7 num_microbatches of the whole batch",
    "7 an all_reduce of the reported loss",
    "7 losses as a dict",
    "8 one loss of several",
    "8 a loop of one's own",
]


STAGED = [one for one in MUTANTS if str(one) in OF_STAGES]


@proves(Kind.WRONG_SCRIPT, Promise.TOLD, victim="3", moment="2:backward")
@pytest.mark.parametrize("mutant", sampled(STAGED), ids=map(str, STAGED))
def test_a_mutant_with_stages_is_not_silent(
    run: Launch, reference: Reference, tmp_path: Path, mutant: Mutant
) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(mutant.script)
    spec = replace(PP2_DP2, steps=4, kills=("3@2:backward",), script=str(script))
    done = run(spec)
    if mutant.end == TRAINS:
        check_equal(done, reference(replace(PP2_DP2, steps=4)))
    else:
        check_refused(done, mutant.words.split("=")[0])
