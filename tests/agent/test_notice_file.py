"""`--notice-file`: once the file is there, the workers of its node leave, and the others go on."""

import signal
import time
from pathlib import Path

import pytest

from elaswave_plugin.agent.notice_file import NOTICE_FILE
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.launch.launch import main
from elaswave_plugin.launch.torchrun import supervise
from tests.agent.jobs import TRAINER, Job
from tests.ports import free_port

TERMINATED = "it was told to end by SIGTERM"


def launched(folder: Path, file: Path) -> Job:
    """A job of three nodes, of which the second is told by a file."""
    job, port = Job(folder, 3), free_port()
    for node in range(3):
        told = (f"--notice-file={file}",) if node == 1 else ()
        job.launch("--nnodes=3", f"--node-rank={node}", f"--master-port={port}", *told)
    return job.joined()


@pytest.mark.parametrize(
    ("text", "is_terminated"),
    [("node 7 goes down at noon\nsigned: the scheduler", False), ("", True)],
)
def test_the_workers_of_the_node_leave_between_two_steps(
    tmp_path: Path, text: str, is_terminated: bool
) -> None:
    """Kubernetes does both: its hook before the stop makes the file, and then it sends SIGTERM."""
    file = tmp_path / "notice"
    with launched(tmp_path / "job", file) as job:
        for slot in range(3):
            job.tell(slot, "step 1")
        file.write_text(text)
        if is_terminated:
            time.sleep(0.5)  # both within the second in which notices are gathered
            job.launchers[1].terminate()
        for slot in (0, 2):
            commit = job.one("commit", slot, epoch=2)
            assert commit["ranks"] == [0, 2]
            said = f": {text.splitlines()[0]}" if text else " is there"
            # Whichever was seen first.
            reasons = [f"the notice file {file}{said}", TERMINATED][: 1 + is_terminated]
            assert commit["reason"] in {f"worker 1 (node 1) left: {reason}" for reason in reasons}
            job.tell(slot, "release")
        job.one("stopped", 1)
        assert job.code(1) == (128 + signal.SIGTERM if is_terminated else 0)
        assert job.finish([0, 2]) == 0


def test_a_file_that_is_there_at_the_start_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notice"
    file.touch()
    assert main([f"--notice-file={file}", str(TRAINER)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"the notice file '{file}' exists" in said and "remove it" in said
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    program = Program(script=str(TRAINER), args=(), module=False)
    with pytest.raises(ConfigurationError, match="exists, which tells the workers"):
        supervise(program, {**env, NOTICE_FILE: str(file)})


def test_a_file_in_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "away" / "notice"
    assert main([f"--notice-file={file}", str(TRAINER)]) == 2
    assert f"'{file}', whose folder does not exist: create it" in capsys.readouterr().err
