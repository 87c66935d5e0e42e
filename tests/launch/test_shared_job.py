"""`elaswave run --rdzv-dir`: each node has the same line, which starts, joins, or tells the end."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.agent.peers.job_place import held
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.core.agreement.founding import LEASE_S, Waiting
from tests.agent.jobs import TRAINER, Job
from tests.faults.network import namespaces
from tests.idle import Deadline
from tests.launch.test_join import let_in
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def line(job: Job, nodes: str, *options: str, within: tuple[str, ...] = ()) -> int:
    """Start the line on one more node; its number among the launchers."""
    job.launch(
        f"--nnodes={nodes}",
        "--rdzv-id=fox",
        f"--rdzv-dir={job.folder / 'shared'}",
        "--rdzv-last-call=1",
        *options,
        within=within,
    )
    return len(job.launchers) - 1


def launcher_of(job: Job, node: int) -> int:
    """The number of the launcher that has begun a node of the launch."""
    pids = [process.pid for process in job.launchers]
    events = [event for event in job.events("job_started") if event["node"] == node]
    return pids.index(events[-1]["launcher_pid"])


def runs(job: Job, *, life: int) -> None:
    """Wait until the record says that this life of the job runs."""
    deadline = Deadline(job.wait_s)
    while True:
        with held(job.folder / "shared" / "fox") as record:
            if (record.record.life, record.record.state) == (life, "runs"):
                return
        assert deadline.left_s(), record.record
        time.sleep(0.05)  # the file is all that shows it


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
@pytest.mark.parametrize("victim", sampled([0, 2]))
def test_the_same_line_starts_the_job_joins_it_and_tells_its_end(
    tmp_path: Path, victim: int
) -> None:
    with Job(tmp_path, 3) as job:
        for _ in range(3):
            line(job, "3")
        job.joined()
        rest = [slot for slot in range(3) if slot != victim]
        others = [launcher_of(job, node) for node in rest]
        job.launchers[launcher_of(job, victim)].kill()
        job.all("commit", rest, epoch=2)
        number = line(job, "3")
        job.one("detached", victim)
        assert let_in(job, victim, rest, 3) == [0, 1, 2]
        assert job.finish([0, 1, 2], launcher=number) == 0
        assert [job.code(one) for one in others] == [0, 0]
        late = line(job, "3")
        assert job.code(late) == 0
        assert "has ended with exit code 0" in job.output(late)
        assert len(job.events("job_started")) == 3


@proves(Kind.LEAVE, Promise.ENDS_WELL)
def test_one_that_is_too_many_stands_by_until_a_slot_is_free(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        for _ in range(2):
            line(job, "2:3")
        job.joined()
        # Its other options are those of the job.
        spare = line(job, "2:3", "--reserve=1", "--quorum-wait-s=7")
        words = "the job starts on 2 of 2 to 3 nodes, and grows by none: --reserve is 0"
        assert words in job.outputs()
        assert job.nothing("detached", 1, for_s=3.0)
        job.launchers[launcher_of(job, 1)].kill()
        job.one("commit", 0, epoch=2)
        job.one("detached", 1)
        assert let_in(job, 1, [0], 3) == [0, 1]
        assert job.finish([0, 1], launcher=spare) == 0


@proves(Kind.NODE, Promise.ENDS_WELL)
def test_a_new_life_begins_once_the_lease_of_the_last_has_run_out(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.wait_s *= 2
        for _ in range(2):
            line(job, "2")
        job.joined(sealed=False)
        runs(job, life=1)
        began_s = time.monotonic()
        for process in job.launchers:
            process.kill()
        job.reports.clear()
        for _ in range(2):
            line(job, "2")
        job.all("started", range(2))
        assert time.monotonic() - began_s > LEASE_S - 2.0  # it was renewed within 2 s before
        job.all("commit", range(2), epoch=1)
        runs(job, life=2)
        assert job.finish([0, 1], launcher=2) == 0
        assert job.code(3) == 0


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_second_cluster_with_that_name_and_folder_begins_no_second_job(tmp_path: Path) -> None:
    """None of its machines reaches the job whose record they see."""
    with namespaces(1) as (elsewhere,), Job(tmp_path, 2) as job:
        for _ in range(2):
            line(job, "2")
        job.joined()
        others = [line(job, "2", within=elsewhere) for _ in range(2)]
        for number in others:
            job.said("for an answer of the job, which lives, from", number)
        assert job.nothing("started", 0, for_s=LEASE_S + 2.0)
        assert job.finish([0, 1]) == 0
        assert [job.code(number) for number in others] == [0, 0]
        assert len(job.events("job_started")) == 2


def test_another_script_under_the_same_name_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        for _ in range(2):
            line(job, "2")
        job.joined()
        other = tmp_path / "other.py"
        other.write_text("")
        number = line(job, "2", str(other))
        assert job.code(number) == 2
        assert "script" in job.output(number)
        assert job.finish([0, 1]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes=3:2", "--rdzv-dir=D", "--rdzv-id=fox"], "MIN is above MAX"),
        (["--nnodes=2:3"], "needs --rdzv-dir"),
        (["--nnodes=two", "--rdzv-dir=D", "--rdzv-id=fox"], "wanted a number"),
        (["--rdzv-dir=D"], "wanted the job's name"),
        (["--rdzv-dir=D", "--rdzv-id=../fox"], "wanted the job's name"),
        (["--rdzv-id=fox"], "--rdzv-dir or --rdzv-endpoint not"),
        (["--rdzv-dir=D", "--rdzv-id=fox", "--master-addr=h"], "say the same twice"),
        (["--rdzv-dir=/proc/none", "--rdzv-id=fox"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    given = [one.replace("=D", f"={tmp_path}") for one in options]
    assert run_command(["run", *given, str(TRAINER)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elaswave run: ")
    assert words in said


@proves(Kind.LEAVE, Promise.ENDS_WELL)
def test_a_notice_ends_a_node_that_waits(tmp_path: Path) -> None:
    """It waits for another one, and has no workers that could leave."""
    with Job(tmp_path, 2) as job:
        notice = tmp_path / "leave"
        number = line(job, "2", f"--notice-file={notice}")
        while not (job.folder / "shared" / "fox" / "job.json").exists():
            assert job.launchers[number].poll() is None, job.output(number)
            time.sleep(0.05)
        notice.touch()
        assert job.code(number) == 143
        assert "this node waits no more" in job.output(number)


@proves(Kind.NEWCOMER, Promise.GOES_ON)
def test_those_that_were_chosen_meet_again_where_one_does_not_come(tmp_path: Path) -> None:
    """It was there when the founder looked, and is gone before the meeting."""
    with Job(tmp_path, 2) as job:
        number = line(job, "2", "--start-timeout-s=3")
        folder = job.folder / "shared" / "fox"
        looks = 0
        while not (folder / "job.json").exists():
            assert job.launchers[number].poll() is None, job.output(number)
            time.sleep(0.05)
        deadline = Deadline(job.wait_s)
        while True:
            with held(folder) as record:
                now = record.record
                if now.state != "meets":
                    break
                looks += 1
                ghost = {"ghost": Waiting(looks=looks)}
                record.write(replace(now, waiting={**now.waiting, **ghost}))
            assert deadline.left_s(), now
            time.sleep(0.2)
        assert now.chosen[1:] == ("ghost",)
        job.said("did not come within 3 s", number)
        other = line(job, "2")
        job.joined()
        assert job.finish([0, 1], launcher=number) == 0
        assert job.code(other) == 0
