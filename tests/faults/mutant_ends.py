"""The ends that a mutant of a script may come to, as checks of the run: none of them is silent."""

from pathlib import Path

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines
from tests.faults.harness import Outcome
from tests.faults.replacements import DETACHED, LESS, RAISES, REFUSED

# What a job says that is in order, and what DeepSpeed does.
USUAL = ("elaswave: snapshots use", "elaswave: the job: `elaswave status", "step ", "[20")
# What a DeepSpeed loop is told of a collective of its own, when it first makes one.
SAYS_BARE = "calls the other workers outside of the engine: if a loss meets it, the job ends"
SAYS_DETACHED = "trains without elaswave, and no loss will be survived"


def check_told(run: Outcome, end: str, words: str) -> None:
    """The end of a mutant that does not train right; nobody is started again for it."""
    assert not run.orphans
    events = run.directory / EVENTS_FILE
    started = [e for e in read_lines(events) if e["kind"] == "worker_started"]
    assert {event["incarnation"] for event in started} == {0}
    checks = {REFUSED: check_refused, RAISES: check_raised, DETACHED: check_detached}
    (checks | {LESS: check_less})[end](run, words)


def check_refused(run: Outcome, words: str) -> None:
    """Exit code 2 in the first step, and one line that names what to write."""
    assert run.returncode == 2, run.output[-4000:]
    said = [line for line in run.output.splitlines() if not line.startswith(USUAL)]
    said = [line for line in said if SAYS_BARE not in line]
    if "unrecognized arguments" in run.output:
        # A parser explains at length what it does not know.
        said = [line for line in said if line.startswith("elaswave: ")]
    assert len(said) == 1 and words in said[0], run.output[-4000:]
    steps: Path = run.directory / STEPS_FILE
    assert not steps.exists() or all(record["step"] == 0 for record in read_lines(steps))


def check_less(run: Outcome, words: str) -> None:
    """It survives the loss, and one line says at the start what losses take away."""
    assert run.returncode == 0, run.output[-4000:]
    assert run.output.count(words) == run.output.count("1 loss survived") == 1


def check_raised(run: Outcome, words: str) -> None:
    """The script's own error, once."""
    assert run.returncode == 1, run.output[-4000:]
    # What cannot be compiled has none; nor has a script that ends too early.
    traced = not words.startswith(("IndentationError", "job.finish"))
    assert run.output.count("Traceback (most recent call last)") == traced, run.output[-4000:]
    assert words in run.output, run.output[-4000:]
    assert "no live worker remains" not in run.output


def check_detached(run: Outcome, words: str) -> None:
    """It trains as without the plugin, and one line says so and what it lacks."""
    assert run.returncode == 0, run.output[-4000:]
    said = [line for line in run.output.splitlines() if SAYS_DETACHED in line]
    assert len(said) == 1 and words in said[0], run.output[-4000:]
    assert not (run.directory / STEPS_FILE).exists()
