"""Standard streams that are closed, full, or read by nobody any more cost a job nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from elaswave_plugin.cli.main import run_command
from tests.agent.jobs import LAUNCH, TRAINER, WAIT_S, Job, environment
from tests.observer.made_up import make_run
from tests.ports import free_port

SLOTS = range(3)


def through_a_shell(job: Job, shell: str) -> Job:
    """The job under a launcher whose standard streams are those that the shell's words make."""
    launcher = [sys.executable, "-c", LAUNCH, "--nproc-per-node=3", f"--dir={job.run_dir}"]
    words = [*launcher, str(TRAINER)]
    job.launch(command=["bash", "-o", "pipefail", "-c", shell, "bash", *words])
    return job.joined()


@pytest.mark.parametrize("shell", ['"$@" 2>&1 | head -n 1', '"$@" 2> >(head -n 1) | head -n 1'])
def test_output_that_nobody_reads_any_more_costs_nobody(tmp_path: Path, shell: str) -> None:
    with through_a_shell(Job(tmp_path, 3), shell) as job:
        for _ in range(3):
            for slot in SLOTS:
                job.tell(slot, "print")
            job.all("printed", SLOTS)
        assert job.finish(SLOTS) == 0
        assert job.left(WAIT_S) == []
        assert [event["status"] for event in job.events("worker_exited")] == 3 * ["exit code 0"]
    assert job.output().splitlines().count(100 * "x") <= 1


def test_output_that_nobody_reads_costs_nobody_under_another_launcher(tmp_path: Path) -> None:
    """One that starts the workers with its own output, as torchrun and a shell do."""
    place = f"WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    one = f'RANK=$r LOCAL_RANK=$r {place} "$@" & pids="$pids $!"'
    every = f"for r in 0 1 2; do {one}; done; for p in $pids; do wait $p || exit; done"
    with Job(tmp_path, 3, ELASWAVE_DIR=str(tmp_path / "run")) as job:
        words = [sys.executable, "-m", "elaswave_plugin.run", str(TRAINER)]
        piped = f"{{ {every}; }} 2>&1 | head -n 1"
        job.launch(command=["bash", "-o", "pipefail", "-c", piped, "bash", *words])
        job.joined()
        for _ in range(3):
            for slot in SLOTS:
                job.tell(slot, "print")
            job.all("printed", SLOTS)
        assert job.finish(SLOTS) == 0, job.output()
        assert job.left(WAIT_S) == []
        assert [event["status"] for event in job.events("worker_exited")] == 3 * ["exit code 0"]


def test_all_that_a_job_prints_into_a_pipe_arrives(tmp_path: Path) -> None:
    with through_a_shell(Job(tmp_path, 3), '"$@" 2>&1 | cat') as job:
        for slot in SLOTS:
            job.tell(slot, "print")
        job.all("printed", SLOTS)
        job.tell(1, "exit 3")
        job.all("commit", [0, 2], epoch=2)
        assert job.finish([0, 2]) == 0
    lines = job.output().splitlines()
    assert (lines.count(100 * "x"), lines.count(100 * "y")) == (3, 3)
    assert "worker 1 (node 0) exited: exit code 3" in job.output()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_job_without_standard_streams_runs(tmp_path: Path, closed: str) -> None:
    with through_a_shell(Job(tmp_path, 3), f'"$@" {closed}') as job:
        for slot in SLOTS:
            job.tell(slot, "print")
        job.all("printed", SLOTS)
        job.kill(1)
        job.all("commit", [0, 2], epoch=2)
        assert job.finish([0, 2]) == 0
        assert job.left(WAIT_S) == []


def test_a_report_that_finds_no_room_is_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", killed=False)
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "elaswave_plugin.cli.main", "report", str(run)],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "elaswave: standard output cannot be written: No space left on device; free some, or write"
        " it elsewhere\n"
    )


def test_a_file_of_a_report_that_finds_no_room_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", killed=False)

    def full(figure: Figure, path: Path) -> None:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(Figure, "savefig", full)
    assert run_command(["report", str(run), "--out", str(tmp_path / "x.png")]) == 1
    said = f"elaswave: '{tmp_path}/x.png' cannot be written: No space left on device; free some"
    assert capsys.readouterr().err.startswith(said)


def test_streams_in_the_place_of_closed_ones_have_their_numbers() -> None:
    """An agent closes all descriptors but these, and what it opens gets the next ones."""
    script = (
        "import os, sys\n"
        "from elaswave_plugin.launch.standard_streams import fill_closed_streams\n"
        "fill_closed_streams()\n"
        "numbers = [one.fileno() for one in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "os._exit(0 if numbers == [0, 1, 2] else 9)\n"
    )
    shell = '"$@" <&- >&- 2>&-'
    words = ["bash", "-c", shell, "bash", sys.executable, "-c", script]
    assert subprocess.run(words, env=environment(), timeout=WAIT_S).returncode == 0
