"""`elaswave status`: real jobs that are asked while they run."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.cli.status import ask_job, find_job
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.address_file import Address, published, read_addresses
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from tests.agent.jobs import LAUNCH, TRAINER, WAIT_S, Job, environment
from tests.agent.test_status_page import column, drawn

Record = dict[str, Any]
TIMEOUT_S = 10.0
KILLED = "worker 2 (node 1) exited: killed by SIGKILL"


def ask(job: Job) -> Record:
    """The status of a job, through its run directory."""
    return ask_job(find_job(job.run_dir, None), TIMEOUT_S)


def test_a_job_tells_its_view_its_snapshots_and_after_a_kill_the_new_view(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=2) as job:
        before = ask(job)
        job.kill(2)
        job.all("commit", [0, 1, 3], epoch=2)
        for slot in (0, 1, 3):
            job.tell(slot, "seal 1")
        job.all("copied", [0, 1, 3], step=1)
        after = ask(job)
        assert job.finish([0, 1, 3]) == 0
        assert job.code(1) == 0
        assert job.left(WAIT_S) == []
    assert os.listdir(job.run_dir) == ["events.jsonl"]
    assert (before["view"]["epoch"], before["view"]["ranks"]) == (1, [0, 1, 2, 3])
    assert column(before, "phase") == [BETWEEN_STEPS] * 4
    assert column(before, "suspicion") == [None] * 4
    assert column(before, "trainer_pid") == [job.pids[slot] for slot in range(4)]
    assert column(before, "agent_pid") == [job.agents[slot] for slot in range(4)]
    assert [
        (one["node"], one["pid"], one["life"], one["slots"], one["leads"], one["silent"])
        for one in before["nodes"]
    ] == [(0, job.agents[0], 0, [0, 1], True, None), (1, job.agents[2], 0, [2, 3], False, None)]
    assert {one["host"] for one in before["nodes"]} == {socket.gethostname()}
    held = {"step": 0, "epoch": 1}
    # Those whose copy is on their own node are held by no other one.
    holders = [[], [{"slot": 2, **held}], [], [{"slot": 0, **held}]]
    assert column(before, "snapshot") == [
        {**held, "bytes": 65536, "held_by": holders[slot]} for slot in range(4)
    ]
    assert (after["view"]["epoch"], after["view"]["ranks"]) == (2, [0, 1, 3])
    assert after["view"]["reason"] == KILLED and after["proposal"] is None
    assert column(after, "rank") == [0, 1, None, 2]
    assert column(after, "phase") == [BETWEEN_STEPS, BETWEEN_STEPS, "exited", BETWEEN_STEPS]
    assert column(after, "suspicion") == [None, None, "killed by SIGKILL", None]
    assert [snapshot["step"] for snapshot in column(after, "snapshot")] == [1, 1, 0, 1]
    assert [(view["epoch"], view["workers"]) for view in after["views"]] == [(1, 4), (2, 3)]
    committed = job.events("view_committed")
    for view, event in zip(after["views"], committed, strict=True):
        assert abs(view["time_s"] - event["time_s"]) < 1
    text = drawn(after)
    assert f"3 workers (view 2): {KILLED}" in text and "1 (view 2)" in text
    for slot in (0, 1, 3):
        assert f" {job.pids[slot]} " in text
    assert all(f" {job.agents[slot]} " in text for slot in (0, 2))
    assert f" {job.pids[2]} " not in text
    assert "slots by rank: 0 1 3" in text and "worker 2: killed by SIGKILL" in text


def test_a_worker_that_does_not_answer_is_suspected(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(2, "deaf")
        job.one("deaf", 2)
        job.kill(1)
        job.all("ring", [0, 2], epoch=2)
        status = ask(job)
        job.tell(2, "answer")
        job.all("commit", [0, 2], epoch=2)
        answered = ask(job)
        assert job.finish([0, 2]) == 0
    assert status["proposal"]["epoch"] == 2 and "killed by SIGKILL" in status["proposal"]["reason"]
    assert status["view"]["epoch"] == 1
    assert column(status, "phase")[2] == f"stopping ({BETWEEN_STEPS})"
    assert column(status, "suspicion")[2].startswith("has not answered the proposal of view 2 for")
    assert "view 2 proposed" in drawn(status)
    assert answered["proposal"] is None and column(answered, "suspicion")[2] is None


def test_any_agent_names_the_others(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=4) as job:
        addresses = {event["slot"]: event["address"] for event in job.events("worker_started")}
        job.kill_node(0)
        job.all("commit", [1, 2, 3], epoch=2)
        host, _, port = addresses[3].rpartition(":")
        assert host == "127.0.0.1"
        status = ask_job(find_job(None, f"localhost:{port}"), TIMEOUT_S)
        assert job.finish([1, 2, 3], launcher=1) == 0
        for launcher in (2, 3):
            assert job.code(launcher) == 0
    assert os.listdir(job.run_dir) == ["events.jsonl"]  # that of the killed one went too
    assert column(status, "address") == [addresses[slot] for slot in range(4)]
    assert column(status, "phase") == ["gone", *[BETWEEN_STEPS] * 3]
    assert column(status, "suspicion")[0].startswith("its agent is gone: ")
    assert [(one["leads"], one["silent"] is None) for one in status["nodes"]] == [
        (False, False),
        (True, True),
        (False, True),
        (False, True),
    ]
    # Its newest snapshot is in another's care.
    assert [one["slot"] for one in column(status, "snapshot")[0]["held_by"]] == [1]


def test_the_layout_is_that_of_the_trainers(tmp_path: Path) -> None:
    layout = launch_layout(tp=1, pp=2, dp=1, num_layers=2)
    with Job(tmp_path, 2).start() as job:
        for slot in (0, 1):
            job.tell(slot, f"layout {json.dumps(layout.to_json()).replace(' ', '')}")
        job.all("layout", [0, 1])
        status = ask(job)
        assert job.finish([0, 1]) == 0
    assert status["layout"] == layout.to_json()
    assert "layout: stage 0, layers 0: r0 w0; stage 1, layers 1: r0 w1" in drawn(status)


def test_the_command_draws_once_or_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with Job(tmp_path, 2).start() as job:
        assert run_command(["status", str(job.run_dir)]) == 0
        table = capsys.readouterr().out
        assert run_command(["status", str(job.run_dir), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert job.finish([0, 1]) == 0
    assert "2 workers (view 1): the job starts" in table and BETWEEN_STEPS in table
    assert status["view"]["ranks"] == [0, 1]


def test_watching_ends_with_the_job(tmp_path: Path) -> None:
    command = "import sys; from elaswave_plugin.cli.main import main; main(sys.argv[1:])"
    with Job(tmp_path, 2).start() as job:
        watching = subprocess.Popen(
            [sys.executable, "-c", command, "status", str(job.run_dir), "--watch"],
            stdout=subprocess.PIPE,
            env=environment(COLUMNS="120", FORCE_COLOR="1"),
            text=True,
        )
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert job.finish([0, 1]) == 0
        rest, _ = watching.communicate(timeout=WAIT_S)
    assert "2 workers (view 1)" in first
    assert "the job is over" in rest and watching.returncode == 0


def test_the_addresses_are_for_their_owner_and_replace_those_of_a_killed_job(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    old = published(str(run_dir), Address(node=7, pid=1, address="127.0.0.1:1"), lambda node: False)
    old.__enter__()
    assert len(read_addresses(run_dir)) == 1
    with Job(tmp_path, 2).start(nodes=2) as job:
        files = sorted(run_dir.glob("agent-*"))
        assert [file.name for file in files] == ["agent-0.json", "agent-1.json"]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
        for node in range(2):
            job.launchers[node].terminate()
        assert [job.code(node) for node in range(2)] == [143, 143]
    assert read_addresses(run_dir) == []


def test_without_a_run_directory_the_address_is_printed(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.launch(command=[sys.executable, "-c", LAUNCH, "--nproc-per-node=2", str(TRAINER)])
        for report in job.all("started", [0, 1]):
            job.watch(report["pid"])
        for slot in (0, 1):
            job.tell(slot, "seal 0")
        address = job.said("--connect").split("--connect ")[1].split("`")[0]
        assert ask_job(find_job(None, address), TIMEOUT_S)["view"]["ranks"] == [0, 1]
        assert job.finish([0, 1]) == 0


# ---- bad input ----------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "wanted a run directory or --connect HOST:PORT, and neither is given"),
        (["{dir}", "--connect", "a:1"], "and both are given"),
        (["{dir}/none"], "/none is no directory; give the run directory"),
        (["{dir}"], "no job is running in"),
        (["--connect", "here"], "--connect is 'here', wanted HOST:PORT"),
        (["--connect", "here:0"], "--connect is 'here:0', wanted HOST:PORT"),
        (["--connect", "127.0.0.1:1"], "no agent answers within 5 s (127.0.0.1:1: Conn"),
        (["--connect", "no.such.host.invalid:5"], "no agent answers within 5 s (no.such"),
        (["--connect", "{silent}", "--timeout-s", "0.2"], "no agent answers within 0.2 s"),
        (["--connect", "h:1", "--timeout-s", "0"], "--timeout-s is 0, wanted more than 0"),
        (["{dir}", "--watch", "--json"], "--watch draws and --json prints once"),
    ],
)
def test_bad_input_costs_one_sentence(
    arguments: list[str],
    words: str,
    listener: socket.socket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = f"127.0.0.1:{listener.getsockname()[1]}"
    given = [argument.format(dir=tmp_path, silent=silent) for argument in arguments]
    assert run_command(["status", *given]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("elaswave: ")


def test_addresses_that_a_killed_job_left_are_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Job(tmp_path, 2).start() as job:
        job.kill_node(0)
        job.code()
    assert len(read_addresses(job.run_dir)) == 1
    assert run_command(["status", str(job.run_dir)]) == 2
    error = capsys.readouterr().err
    assert "Connection refused): the job is over, or cannot be reached" in error


def test_another_process_at_an_old_address_is_not_taken_for_the_job(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with Job(tmp_path, 2).start() as job:
        (now,) = read_addresses(job.run_dir)
        old = Address(node=0, pid=now.pid + 1, address=now.address)
        with (
            published(str(tmp_path / "old"), old, lambda node: False),
            pytest.raises(ConfigurationError, match="another process answers there"),
        ):
            ask_job(find_job(tmp_path / "old", None), TIMEOUT_S)
        assert job.finish([0, 1]) == 0
