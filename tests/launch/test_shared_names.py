"""`elaswave run --rdzv-endpoint`: the same line on every node, which lists their names."""

import socket
import time
from pathlib import Path

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.core.agreement.founding import LEASE_S
from tests.agent.jobs import TRAINER, Job
from tests.launch.test_join import let_in
from tests.launch.test_shared_job import launcher_of
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves

# A name founds only once leases that it may have renewed before have run out.
START_S = 40.0


def names(count: int) -> tuple[str, ...]:
    """Names of nodes, all on this host."""
    return tuple(f"127.0.0.1:{free_port()}" for _ in range(count))


def line(job: Job, nodes: str, endpoint: tuple[str, ...], *options: str) -> int:
    """Start the line on one more node; its number among the launchers."""
    job.launch(
        f"--nnodes={nodes}",
        "--rdzv-id=fox",
        f"--rdzv-endpoint={','.join(endpoint)}",
        "--rdzv-last-call=1",
        *options,
    )
    return len(job.launchers) - 1


def stands_still(job: Job, slot: int, words: str) -> None:
    """Wait until its agent has no lease any more, as it says: then a worker does nothing."""
    job.said(words, launcher_of(job, slot))
    time.sleep(LEASE_S)
    job.tell(slot, "act 0")
    assert job.nothing("acts", slot, for_s=3.0)


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
@pytest.mark.parametrize("count", [1, 3], ids=["one name", "all names"])
def test_the_same_line_starts_the_job_joins_it_and_tells_its_end(
    tmp_path: Path, count: int
) -> None:
    with Job(tmp_path, 3) as job:
        job.wait_s = START_S
        endpoint = names(count)
        for _ in range(3):
            line(job, "3" if count == 1 else "2:3", endpoint)
        job.joined()
        victim, rest = 2, [0, 1]
        others = [launcher_of(job, node) for node in rest]
        job.launchers[launcher_of(job, victim)].kill()
        job.all("commit", rest, epoch=2)
        number = line(job, "3" if count == 1 else "2:3", endpoint)
        job.one("detached", victim)
        assert let_in(job, victim, rest, 3) == [0, 1, 2]
        assert job.finish([0, 1, 2], launcher=number) == 0
        assert [job.code(one) for one in others] == [0, 0]
        assert len(job.events("job_started")) == 3


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
def test_below_the_least_it_waits_and_goes_on_with_one_that_has_forgotten(tmp_path: Path) -> None:
    """The third name is silent by then: the one that returns could found nothing."""
    with Job(tmp_path, 2) as job:
        job.wait_s = START_S
        endpoint = names(3)
        for _ in range(2):
            line(job, "2:3", endpoint)
        job.joined()
        host, _, port = endpoint[2].rpartition(":")
        with socket.create_server((host, int(port))):
            job.launchers[launcher_of(job, 1)].kill()
            job.one("commit", 0, epoch=2)
            stands_still(job, 0, "1 of these names is part of the job, wanted 2")
            number = line(job, "2:3", endpoint)
            job.one("acts", 0)
            job.one("detached", 1)
            assert let_in(job, 1, [0], 3) == [0, 1]
            assert job.finish([0, 1], launcher=number) == 0


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
def test_without_the_one_name_it_waits_until_that_is_back(tmp_path: Path) -> None:
    """The process that is back knows nothing, and is told of the job by the others."""
    with Job(tmp_path, 3) as job:
        job.wait_s = START_S
        endpoint = names(1)
        for _ in range(3):
            line(job, "3", endpoint)
        job.joined()
        job.launchers[launcher_of(job, 0)].kill()
        job.all("commit", [1, 2], epoch=2)
        stands_still(job, 1, "0 of these names are part of the job, wanted 1")
        number = line(job, "3", endpoint)
        job.one("acts", 1)
        job.one("detached", 0)
        assert let_in(job, 0, [1, 2], 3) == [0, 1, 2]
        assert job.finish([0, 1, 2], launcher=number) == 0


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_another_script_under_the_same_name_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, 1) as job:
        endpoint = names(2)
        first = line(job, "2", endpoint)
        job.said("for 1", first)  # it has the first name by then, and waits for the other one
        other = tmp_path / "other.py"
        other.write_text("")
        number = line(job, "2", endpoint, str(other))
        assert job.code(number) == 2
        assert "the job runs tiny_trainer.py, and the other.py here differs" in job.output(number)
        assert job.launchers[first].poll() is None


BAD = [
    (["--nnodes=1:2", "--rdzv-endpoint=a,b"], "wanted at least 2:2"),
    (["--nnodes=2:4", "--rdzv-endpoint=a,b,c,d"], "wanted at least 3:4"),
    (["--nnodes=2:3", "--rdzv-endpoint=a,b"], "has 2 names and --nnodes at most 3"),
    (["--nnodes=2", "--rdzv-endpoint=a,a"], "has a name twice"),
    (["--nnodes=2", "--rdzv-endpoint=a:b"], "wanted HOST or HOST:PORT"),
    (["--nnodes=2", "--rdzv-endpoint=a", "--rdzv-dir=D"], "leave one out"),
    (["--nnodes=2", "--rdzv-endpoint=a", "--node-rank=1"], "say the same twice"),
    (["--nnodes=2", "--rdzv-endpoint=203.0.113.1,203.0.113.2", "--dir=D"], "none of these names"),
    (["--nnodes=2", "--rdzv-endpoint=127.0.0.1"], "needs the job's secret on every node"),
]


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(("options", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    # Set, not deleted: what the command puts there is gone after the test.
    monkeypatch.setenv("ELASWAVE_SECRET_FILE", "")
    given = [one.replace("=D", f"={tmp_path}") for one in options]
    assert run_command(["run", *given, "--rdzv-id=fox", str(TRAINER)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elaswave run: ")
    assert words in said


def test_an_endpoint_at_which_nobody_answers_is_said(tmp_path: Path) -> None:
    with Job(tmp_path, 1) as job:
        number = line(job, "2", ("203.0.113.1:29400",))
        job.said("to answer, where the job may be known", number)
        assert "203.0.113.1:29400" in job.output(number)
        assert job.launchers[number].poll() is None
