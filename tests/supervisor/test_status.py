"""`elaswave status`: real jobs that are asked while they run, and how their answers are merged."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elaswave_plugin.cli.main import run_command
from elaswave_plugin.cli.status import ask_job, find_job, merge
from elaswave_plugin.cli.status_screen import draw_status, draw_workers
from elaswave_plugin.core.agreement.effects import Ring
from elaswave_plugin.core.agreement.hang import OUTSIDE, Sample
from elaswave_plugin.core.agreement.messages import Ballot
from elaswave_plugin.core.agreement.view import MembershipView, first_view
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.layout.reserve import NOBODY_CAME, NOWHERE
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc import requests
from elaswave_plugin.ipc.address_file import Address, published, read_addresses
from elaswave_plugin.ipc.frames import Join, Progress, Quiesced, Ready, SlowSeen
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.requests import in_loop
from elaswave_plugin.supervisor.peers.unheard import Silence
from elaswave_plugin.supervisor.status_board import StatusBoard
from tests.supervisor.jobs import LAUNCH, TRAINER, WAIT_S, Job, environment

Record = dict[str, Any]
TIMEOUT_S = 10.0
KILLED = "worker 2 (node 0) exited: killed by SIGKILL"


def ask(job: Job) -> Record:
    """The status of a job, through its run directory."""
    return ask_job(find_job(job.run_dir, None), TIMEOUT_S)


def column(status: Record, name: str) -> list[Any]:
    return [worker[name] for worker in status["workers"]]


def drawn(status: Record) -> str:
    screen = io.StringIO()
    Console(width=160, file=screen).print(draw_status(status))
    return screen.getvalue()


def test_all_columns_fit_a_terminal_of_80(tmp_path: Path) -> None:
    held = [{"slot": slot, "epoch": 3, "step": 1232} for slot in (1, 2)]
    worker = {
        **{"slot": 12, "incarnation": 1, "rank": 0, "node": 0, "suspicion": None},
        **{"trainer_pid": 1234567, "supervisor_pid": 1234500, "phase": "between steps"},
        **{"step": 1234, "waits_for": 2, "stalled_s": 10.5},
        "snapshot": {"epoch": 3, "step": 1233, "bytes": 123456789, "held_by": held},
    }
    screen = io.StringIO()
    Console(width=80, file=screen).print(draw_workers([worker]))
    text = screen.getvalue()
    wanted = ("12.1", "1234567", "1234500", "between", "1234", "2, 10.5 s", "1233 (view 3)")
    assert all(word in text for word in (*wanted, "(1232)", "117.74")), text


# ---- a running job ------------------------------------------------------------------------------


def test_a_job_tells_its_view_its_snapshots_and_after_a_kill_the_new_view(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start() as job:
        before = ask(job)
        job.kill(2)
        job.all("commit", [0, 1, 3], epoch=2)
        for slot in (0, 1, 3):
            job.tell(slot, "seal 1")
        job.all("copied", [0, 1, 3], step=1)
        after = ask(job)
        assert job.finish([0, 1, 3]) == 0
        assert job.left(WAIT_S) == []
    assert os.listdir(job.run_dir) == ["events.jsonl"]
    assert (before["view"]["epoch"], before["view"]["ranks"]) == (1, [0, 1, 2, 3])
    assert column(before, "phase") == [BETWEEN_STEPS] * 4
    assert column(before, "suspicion") == [None] * 4
    assert column(before, "trainer_pid") == [job.pids[slot] for slot in range(4)]
    assert column(before, "supervisor_pid") == [job.supervisors[slot] for slot in range(4)]
    held = {"step": 0, "epoch": 1}
    assert column(before, "snapshot") == [
        {**held, "bytes": 65536, "held_by": [{"slot": (slot + 1) % 4, **held}]} for slot in range(4)
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
        assert f" {job.pids[slot]} {job.supervisors[slot]} " in text
    assert f" - {job.supervisors[2]} " in text
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


def test_any_supervisor_names_the_others(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=4) as job:
        addresses = {event["slot"]: event["address"] for event in job.events("worker_started")}
        job.kill_supervisor(0)
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
    assert f"its supervisor (pid {job.supervisors[0]}) is gone" in column(status, "suspicion")[0]
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
    old = Address(slot=7, node=0, pid=1, address="127.0.0.1:1")
    published(str(run_dir), old, lambda: ()).__enter__()
    with Job(tmp_path, 2).start() as job:
        files = sorted(run_dir.glob("supervisor-*"))
        assert [file.name for file in files] == ["supervisor-0.json", "supervisor-1.json"]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
        job.launchers[0].terminate()
        assert job.code() == 143
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
        (["--connect", "127.0.0.1:1"], "no supervisor answers within 5 s (127.0.0.1:1: Conn"),
        (["--connect", "no.such.host.invalid:5"], "no supervisor answers within 5 s (no.such"),
        (["--connect", "{silent}", "--timeout-s", "0.2"], "no supervisor answers within 0.2 s"),
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
        job.kill_supervisor(0, 1)
        job.code()
    assert len(read_addresses(job.run_dir)) == 2
    assert run_command(["status", str(job.run_dir)]) == 2
    error = capsys.readouterr().err
    assert "Connection refused): the job is over, or cannot be reached" in error


def test_another_process_at_an_old_address_is_not_taken_for_the_job(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with Job(tmp_path, 2).start() as job:
        (now,) = [one for one in read_addresses(job.run_dir) if one.slot == 0]
        old = Address(slot=0, node=0, pid=now.pid + 1, address=now.address)
        with (
            published(str(tmp_path / "old"), old, lambda: ()),
            pytest.raises(ConfigurationError, match="another process answers there"),
        ):
            ask_job(find_job(tmp_path / "old", None), TIMEOUT_S)
        assert job.finish([0, 1]) == 0


# ---- what is merged -----------------------------------------------------------------------------


def answer(slot: int, **more: object) -> Record:
    """Return what the supervisor of one of three workers answers."""
    view = to_json(first_view((0, 0, 0)))
    peers = [{"slot": s, "node": 0, "pid": 100 + s, "address": f"h:{s}"} for s in range(3)]
    nothing: Record = {"views": [], "proposal": None, "layout": None, "lost": [], "exited": None}
    nothing |= {"standbys": [], "slow": [], "vacant": [], "unheard": []}
    return {
        "t": "status",
        "slot": slot,
        "pid": 100 + slot,
        "trainer_pid": 200 + slot,
        "incarnation": 0,
        "phase": "training",
        "progress": None,
        "view": view,
        "snapshots": [],
        "standbys": [],
        "peers": peers,
        **nothing,
        **more,
    }


def ring(epoch: int, **more: Any) -> Ring:
    return Ring(ballot=Ballot(term=0, leader=0, epoch=epoch), reason="r", **more)


def sealed(owner: int, step: int, epoch: int) -> Record:
    return {"owner": owner, "step": step, "epoch": epoch, "length": 10}


def test_the_newest_view_holds_and_its_losses() -> None:
    new = {**to_json(first_view((0, 0, 0))), "epoch": 3, "ranks": [2, 1], "reason": "so"}
    shut_out = answer(0, lost=[{"slot": 1, "evidence": "its connection closed"}])
    rest = [answer(s, view=new, lost=[{"slot": 0, "evidence": "silent"}]) for s in (1, 2)]
    status = merge([shut_out, *rest], silent={}, now_s=5.0)
    assert status["view"]["epoch"] == 3 and column(status, "rank") == [None, 1, 0]
    assert column(status, "suspicion") == ["silent", None, None]
    assert column(status, "phase") == ["gone", "training", "training"]


def test_the_reserve_is_room_and_no_loss() -> None:
    board, view = StatusBoard(0), first_view((0, NOWHERE, NOWHERE))
    lost = {1: NOBODY_CAME, 2: "its connection closed"}
    peers = [
        Peer(slot=slot, node=node, pid=0, control="", data="", machine="")
        for slot, node in enumerate((0, NOWHERE, 0))
    ]
    told = board.report(
        view=view,
        lost=lost,
        unheard=(),
        peers=peers,
        standbys=[],
        inventory=[],
        progress=None,
        now_s=0.0,
    )
    assert [peer["slot"] for peer in told["peers"]] == [0, 2]
    assert [one["slot"] for one in told["lost"]] == [2] and told["vacant"] == [1]
    status = merge([told], silent={}, now_s=5.0)
    assert column(status, "slot") == [0, 2] and "; 1 more may join" in drawn(status)


def test_the_leader_has_the_evidence() -> None:
    said = [{"slot": 0, "evidence": words} for words in ("declared lost", "its connection closed")]
    answers = [answer(2, lost=[said[0]]), answer(1, lost=[said[1]])]
    assert column(merge(answers, silent={}, now_s=5.0), "suspicion")[0] == said[1]["evidence"]


def sample(slot: int, **more: Any) -> Record:
    usual: dict[str, Any] = {"phase": "backward", "stalled_s": 4.0, "limit_s": 2.0}
    where = {"slot": slot, "incarnation": 0, "epoch": 1, "step": 7, "operations": 3}
    return to_json(Sample(**where, **{**usual, **more}))


def test_a_worker_without_progress_is_suspected_with_who_waits_for_it() -> None:
    pages = [sample(0, waits_for=1), sample(1), sample(2, stalled_s=0.0)]
    status = merge([answer(s, progress=pages[s]) for s in range(3)], silent={}, now_s=5.0)
    evidence = (
        "no progress for 4.0 s in backward of step 7 (limit 2 s with a recovery);"
        " worker 0 waits for it"
    )
    assert column(status, "suspicion") == [None, evidence, None]
    assert column(status, "phase") == ["backward"] * 3 and column(status, "step") == [7] * 3
    assert column(status, "waits_for") == [1, None, None]
    assert "1, 4.0 s" in drawn(status)


def test_a_slow_worker_is_suspected_unless_something_is_worse() -> None:
    slow = ((1, "takes 1.60x as long"), (2, "takes 9.00x as long"))
    board = StatusBoard(0)
    board.heard(SlowSeen(slow=slow))
    facts: Record = {"lost": {}, "peers": [], "inventory": [], "progress": None, "standbys": []}
    facts["unheard"] = []
    told = board.report(view=first_view((0,)), now_s=0.0, **facts)["slow"]
    lost = [{"slot": 2, "evidence": "its link is gone"}]
    status = merge([answer(0, slow=told, lost=lost), answer(1)], silent={}, now_s=5.0)
    assert column(status, "suspicion") == [None, "takes 1.60x as long", "its link is gone"]
    gone = merge([answer(0, slow=told, trainer_pid=0), answer(1)], silent={}, now_s=5.0)
    assert column(gone, "suspicion")[1] is None


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            sample(1),
            "no progress for 4.0 s in backward (limit 2 s with a recovery); no worker waits for it",
        ),
        (sample(1, waits_for=OUTSIDE), None),
        (sample(1, stalled_s=0.1, stopped_s=0.5), "stopped by a signal"),
    ],
)
def test_who_stands_still_and_keeps_nobody_waiting(page: Record, words: str | None) -> None:
    status = merge([answer(0), answer(1, progress=page)], silent={}, now_s=5.0)
    assert column(status, "suspicion")[1] == words


def test_a_supervisor_that_is_silent_is_suspected_itself() -> None:
    status = merge([answer(0), answer(2)], silent={1: "timed out"}, now_s=5.0)
    assert column(status, "suspicion")[1] == "its supervisor (pid 101) does not answer: timed out"
    assert column(status, "phase") == ["training", "unknown", "training"]


def test_a_snapshot_after_a_roll_back_is_newer_than_a_later_step_before() -> None:
    owner = answer(0, snapshots=[sealed(0, 9, 1), sealed(0, 8, 2)])
    holder = answer(1, snapshots=[sealed(0, 9, 1), sealed(0, 7, 2)])
    status = merge([owner, holder, answer(2)], silent={}, now_s=5.0)
    assert column(status, "snapshot") == [
        {"step": 8, "epoch": 2, "bytes": 10, "held_by": [{"slot": 1, "step": 7, "epoch": 2}]},
        None,
        None,
    ]
    assert "1 (7)" in drawn(status)


def test_a_proposal_that_was_committed_is_open_no_more() -> None:
    view = {**to_json(first_view((0, 0, 0))), "epoch": 2, "ranks": [0, 1]}
    old = {"epoch": 2, "reason": "r", "open_s": 4.0, "late": True}
    # The supervisor of a lost trainer is not told of a view that it has no part in.
    status = merge([answer(0, view=view), answer(2, proposal=old)], silent={}, now_s=5.0)
    assert status["proposal"] is None
    status = merge([answer(0), answer(2, proposal=old)], silent={}, now_s=5.0)
    assert status["proposal"] == {"epoch": 2, "reason": "r", "open_s": 4.0}


def test_of_each_view_the_first_moment_counts() -> None:
    views = [[{"epoch": e, "time_s": t, "workers": 3, "reason": "r"}] for e, t in ((1, 7), (1, 6))]
    status = merge([answer(s, views=views[s]) for s in (0, 1)], silent={}, now_s=9.0)
    assert [view["time_s"] for view in status["views"]] == [6]


def reported(board: StatusBoard, view: MembershipView | None = None) -> Record:
    return board.report(
        view=view or first_view((0,)),
        lost={},
        unheard=[Silence(2, 1.5)],
        peers=[],
        standbys=[],
        inventory=[],
        progress=None,
        now_s=2.0,
    )


def test_the_pairs_that_do_not_hear_each_other_are_named() -> None:
    assert reported(StatusBoard(0))["unheard"] == [{"slot": 2, "since_s": 1.5}]
    answers = [answer(0), answer(2, unheard=[{"slot": 1, "since_s": 1.5}])]
    status = merge(answers, silent={}, now_s=5.0)
    assert status["unheard"] == [{"slot": 2, "peer": 1, "since_s": 1.5}]
    assert "worker 2 hears nothing of worker 1 for 4 s" in drawn(status)


def test_the_phases_of_a_board() -> None:
    board = StatusBoard(0)

    view = first_view((0,))
    seen = [reported(board)["phase"]]
    actions: list[Callable[[], None]] = [
        lambda: board.started(5, 0),
        lambda: board.heard(Join(facts={}, respawn=0)),
        lambda: board.proposed(ring(1), 1.0),
        lambda: board.committed([view], 1.0),
        lambda: board.proposed(ring(2, boundary=True), 1.0),
        lambda: board.proposed(ring(2, boundary=True, before_step=5), 1.0),
        lambda: board.heard(Progress(text="evaluation")),
        lambda: board.heard(Quiesced(epoch=2, facts={})),
        lambda: board.committed([view], 1.0),
        lambda: board.exited("killed by SIGKILL"),
        lambda: board.started(6, 1),
        lambda: board.heard(Join(facts={}, respawn=0)),
        lambda: board.heard(Ready(facts={})),
        lambda: board.committed([view], 1.0),
        board.dismissed,
        lambda: board.exited("exit code 0"),
    ]
    for happens in actions:
        happens()
        seen.append(reported(board)["phase"])
    first = "starting starting joined joined training training stopping evaluation quiesced"
    second = ["training", "exited", "starting", "building", "waiting to enter", "training"]
    assert seen == [*first.split(), *second, "leaving", "leaving"]


def test_what_the_predecessor_died_of_is_forgotten() -> None:
    board = StatusBoard(0)

    board.started(5, 0)
    board.exited("killed by SIGKILL")
    died = reported(board)["exited"]
    board.started(6, 1)
    assert (died, reported(board)["exited"]) == ("killed by SIGKILL", None)


def test_an_answer_that_fails_is_told_and_leaves_the_supervisor_alone() -> None:
    reactor = Reactor()

    def fail(request: Record) -> Record:
        raise OSError("no such descriptor")

    ask = in_loop(reactor, fail)
    answers: list[Record] = []

    def client() -> None:
        answers.append(ask({"t": "status"}))
        reactor.post(reactor.stop)

    thread = threading.Thread(target=client)
    thread.start()
    reactor.run()
    thread.join(WAIT_S)
    reactor.close()
    assert answers == [{"error": "OSError: no such descriptor"}]


def test_what_the_loop_comes_to_too_late_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.05)
    reactor, done = Reactor(), []
    ask = in_loop(reactor, lambda request: done.append(request) or {})  # type: ignore[func-returns-value]
    answer = ask({"t": "drain"})  # nobody runs the loop
    reactor.post(reactor.stop)
    reactor.run()
    reactor.close()
    assert answer == {"error": "its control loop did not answer within 0.05 s"}
    assert done == []


def test_what_the_loop_has_begun_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.5)
    reactor, begun = Reactor(), threading.Event()

    def slowly(request: Record) -> Record:
        begun.set()
        time.sleep(0.7)
        return {"done": request["t"]}

    loop = threading.Thread(target=reactor.run)
    loop.start()
    answer = in_loop(reactor, slowly)({"t": "drain"})
    reactor.post(reactor.stop)
    loop.join(WAIT_S)
    reactor.close()
    assert begun.is_set() and answer == {"done": "drain"}


def test_a_torn_address_file_is_nobodys_and_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "supervisor-7.json").write_text("")
    (tmp_path / "supervisor-8.json").write_text('{"slot": 8}')
    mine = Address(slot=3, node=0, pid=1, address="127.0.0.1:1")
    with published(str(tmp_path), mine, lambda: [(7, 5)]):
        assert read_addresses(tmp_path) == [mine]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "supervisor-7.json",
        "supervisor-8.json",
    ]


def test_a_view_is_among_the_views_as_soon_as_it_is_the_one() -> None:
    """It is decided a moment before the trainer is told, and a request may come in between."""
    board, view = StatusBoard(0), first_view((0,))
    decided = replace(view, epoch=view.epoch + 1, reason="a worker was lost")
    for told in ((), (decided,)):
        board.committed(told, 1.0)
        answer = reported(board, decided)
        assert [one["epoch"] for one in answer["views"]] == [decided.epoch]
        assert answer["views"][0]["time_s"] == (1.0 if told else 2.0)
    none = reported(StatusBoard(0), view)
    assert none["views"] == []
