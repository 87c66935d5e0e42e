"""No mutant of the example is silent: it trains right, says what to write, or fails once."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.mutants import Mutant, mutants
from tests.faults.mutants_page import PAGE, page
from tests.faults.replacements import RAISES, REFUSED, TRAINS

SPEC = JobSpec(nproc=2, steps=4, global_batch=4)
MUTANTS = list(mutants())
# What a job says that is in order.
USUAL = ("elaswave: snapshots use", "step ")


def check_refused(run: Outcome, words: str) -> None:
    """Exit code 2 in the first step, and one line that names what to write."""
    assert run.returncode == 2, run.output[-4000:]
    said = [line for line in run.output.splitlines() if not line.startswith(USUAL)]
    if "unrecognized arguments" in run.output:
        # A parser explains at length what it does not know.
        said = [line for line in said if line.startswith("elaswave: ")]
    assert len(said) == 1 and words in said[0], run.output[-4000:]
    steps = run.directory / STEPS_FILE
    assert not steps.exists() or all(record["step"] == 0 for record in read_lines(steps))


def check_raised(run: Outcome, words: str) -> None:
    """The script's own error, once, and nobody is started again for it."""
    assert run.returncode == 1, run.output[-4000:]
    # What cannot be compiled has none; nor has a script that ends too early.
    traced = not words.startswith(("IndentationError", "job.finish"))
    assert run.output.count("Traceback (most recent call last)") == traced, run.output[-4000:]
    assert words in run.output, run.output[-4000:]
    assert "no live worker remains" not in run.output


def test_the_page_has_every_mutant() -> None:
    assert PAGE.read_text() == page(), "print it anew: python -m tests.faults.mutants_page"


@pytest.mark.parametrize("mutant", MUTANTS, ids=map(str, MUTANTS))
def test_a_mutant_is_not_silent(
    run: Launch, reference: Reference, tmp_path: Path, mutant: Mutant
) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(mutant.script)
    options = tuple(one.replace("SAVED", str(tmp_path / "saved")) for one in mutant.options)
    trains = mutant.end == TRAINS
    spec = replace(SPEC, options=options, kills=("1@3:backward",), respawn=0 if trains else 10)
    done = run(replace(spec, script=str(script)))
    assert not done.orphans
    if trains:
        check_equal(done, reference(SPEC))
        return
    started = [e for e in read_lines(done.directory / EVENTS_FILE) if e["kind"] == "worker_started"]
    assert {event["incarnation"] for event in started} == {0}
    {REFUSED: check_refused, RAISES: check_raised}[mutant.end](done, mutant.words)


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


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if str(one) in OF_STAGES], ids=str)
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
