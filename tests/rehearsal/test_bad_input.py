"""Bad input to a rehearsal: one sentence, exit code 2, and nothing is left."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse, rehearsed

pytestmark = pytest.mark.timeout(300)
RUN = [sys.executable, "-m", "elaswave_plugin.cli.main", "run"]
NEVER = "print('no job here')\n"
NEVER_STARTED = [
    (["--steps", "2", "true"], "--steps is 2, wanted at least 5"),
    ([], "elaswave rehearse got no command"),
    (["no-such-program", "train.py"], "the command 'no-such-program' does not exist"),
    (["--json", "nowhere/out.json", "true"], "--json is 'nowhere/out.json'"),
]


def only_sentence(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("elaswave: ")]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("words", "sentence"), NEVER_STARTED)
def test_nothing_is_started(tmp_path: Path, words: list[str], sentence: str) -> None:
    ended = rehearsed(words, folder=tmp_path)
    assert ended.exit_code == 2, ended.output
    assert sentence in only_sentence(ended.output)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_script_that_is_no_file(tmp_path: Path) -> None:
    ended = rehearsed([*RUN, "--nproc-per-node", "2", "absent.py"], folder=tmp_path)
    assert ended.exit_code == 2, ended.output
    assert "script 'absent.py' is no file" in only_sentence(ended.output)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_command_that_never_attaches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NEVER)
    ended = rehearsed([*RUN, "--nproc-per-node", "2", str(script)], folder=tmp_path)
    assert ended.exit_code == 2, ended.output
    assert "the command never attached to elaswave_plugin" in only_sentence(ended.output)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_script_that_ends_before_the_steps(rehearse: Rehearse) -> None:
    ended = rehearse(JobSpec(nproc=2, steps=3))
    assert ended.exit_code == 2, ended.output
    assert "ended by itself after 3 steps, wanted 6" in only_sentence(ended.output)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_run_that_there_is_not(rehearse: Rehearse) -> None:
    ended = rehearse(JobSpec(nproc=2, steps=20), runs=("losses-9",))
    assert ended.exit_code == 2, ended.output
    assert "--run is 'losses-9', wanted one of dealt-otherwise, losses" in ended.output


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_two_rehearsals_in_one_directory(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    held = os.open(here, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        ended = rehearsed(["true"], folder=tmp_path)
    finally:
        os.close(held)
    assert ended.exit_code == 2, ended.output
    assert "another rehearsal is running in" in only_sentence(ended.output)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_file_of_the_users_is_refused(rehearse: Rehearse, tmp_path: Path) -> None:
    """The example's own log of losses, of a run before."""
    log = tmp_path / "losses.txt"
    log.write_text("of last week\n")
    ended = rehearse(JobSpec(nproc=2, steps=20, options=(f"--log-losses={log}",)))
    assert ended.exit_code == 2, ended.output
    assert f"the script opens for writing {str(log)!r}" in only_sentence(ended.output)
    assert log.read_text() == "of last week\n"


@proves(Kind.NOTHING, Promise.NAMED)
def test_what_is_new_is_named_and_is_no_verdict(rehearse: Rehearse) -> None:
    """The log that the script makes is taken away; what another program makes stays."""
    made = "import os; os.system('touch made')"
    spec = JobSpec(nproc=2, steps=20, options=("--log-losses=losses.txt",), sabotage=made)
    ended = rehearse(spec, runs=("dealt-otherwise",))
    assert ended.exit_code == 0, ended.output
    assert "new or changed in the working directory, by the script or" in ended.output
    assert ended.verdict["equal"]
    assert ended.verdict["changed_files"] == ["made"]
