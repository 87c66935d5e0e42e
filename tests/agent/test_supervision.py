"""Losses of trainers, agents, nodes and leaders in jobs of real processes, all killed by pid."""

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.jobs import LAUNCH, TRAINER, WAIT_S, Job
from tests.idle import within
from tests.launch.test_join import let_in
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves

AGREED_S = 0.015
# Two cores are shared with whatever else runs here; the figure is for an idle machine.
AGREED_LOADED_S = 0.5


def ranks_of(job: Job, slots: list[int], epoch: int) -> list[int]:
    """The ranks that all these trainers see in the commit of an epoch."""
    seen = {tuple(report["ranks"]) for report in job.all("commit", slots, epoch=epoch)}
    assert len(seen) == 1
    return list(seen.pop())


@proves(Kind.KILL, Promise.GOES_ON)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_trainer_leaves_the_others_with_a_new_view(tmp_path: Path, victim: int) -> None:
    with Job(tmp_path, 4).start() as job:
        job.kill(victim)
        rest = [slot for slot in range(4) if slot != victim]
        reports = job.all("commit", rest, epoch=2)
        assert all(report["ranks"] == rest for report in reports)
        reason = f"worker {victim} (node 0) exited: killed by SIGKILL"
        assert all(report["reason"] == reason for report in reports)
        facts = {str(slot): f"address {slot}" for slot in rest}
        assert all(report["facts"] == facts for report in reports)
        rings = job.all("ring", rest, epoch=2)
        assert {ring["thread"] for ring in rings} == {"elaswave-doorbell"}
        assert job.finish(rest) == 0
        assert job.left(WAIT_S) == []
    assert next(event["slot"] for event in job.events("worker_exited")) == victim
    assert job.events("view_committed")[-1]["ranks"] == rest
    assert job.events("job_over")[0]["exit_code"] == 0


@proves(Kind.KILLS, Promise.GOES_ON, victim="0 2")
def test_two_trainers_killed_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start() as job:
        job.kill(0, 2)
        commit = job.one("commit", 1)
        if len(commit["ranks"]) == 3:
            commit = job.one("commit", 1)  # the first of the two was already agreed on
        assert commit["ranks"] == ranks_of(job, [3], commit["epoch"]) == [1, 3]
        assert job.finish([1, 3]) == 0


@proves(Kind.NODE, Promise.GOES_ON, victim="1")
@pytest.mark.parametrize("option", ["--standalone", "--preload=json"], ids=["exec", "zygote"])
def test_a_killed_guardian_takes_its_trainers_and_its_agent_along(
    tmp_path: Path, option: str
) -> None:
    option = "--heartbeat-timeout-s=60" if option == "--standalone" else option
    with Job(tmp_path, 6, option).start(nodes=3) as job:
        job.kill_node(1)
        assert all(job.ended(pid) for pid in (job.agents[2], job.pids[2], job.pids[3]))
        assert ranks_of(job, [0, 1, 4, 5], 2) == [0, 1, 4, 5]
        assert job.finish([0, 1, 4, 5]) == 0
        assert job.left(WAIT_S) == []
    for worker in (2, 3):
        assert f"worker {worker} (node 1) was lost: its agent is gone: " in job.output()
    assert "nobody listens at " in job.output()


@proves(Kind.AGENT, Promise.NOBODY_LOST)
@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)], ids=str)
def test_a_killed_agent_costs_nobody(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    """Another one leads, or follows, in its place: the next change of the view is agreed on."""
    with Job(tmp_path, 4).start(nodes=2) as job:
        job.kill_agent(*(2 * node for node in nodes))
        for node in nodes:
            assert job.next_agent(node, 1) != job.agents[2 * node]
        for slot in range(4):
            job.tell(slot, "seal 1")
        job.all("copied", range(4), step=1)
        assert all(job.nothing("commit", slot, for_s=0.5) for slot in range(4))
        job.kill(3)
        assert ranks_of(job, [0, 1, 2], 2) == [0, 1, 2]
        assert job.finish([0, 1, 2]) == 0
        assert job.left(WAIT_S) == []
    for node in nodes:
        said = f"the agent (pid {job.agents[2 * node]}) ended: killed by SIGKILL; another one"
        assert said in job.output(node)
    assert next(event["slot"] for event in job.events("worker_exited")) == 3
    assert len(job.events("worker_started")) == 4


@proves(Kind.AGENT, Promise.NOBODY_LOST)
def test_an_agent_that_dies_beside_its_trainer_knows_of_that_loss(tmp_path: Path) -> None:
    """The guardian tells the next agent of trainers that ended meanwhile."""
    with Job(tmp_path, 3).start() as job:
        job.kill_agent(0)
        job.kill(1)
        assert ranks_of(job, [0, 2], 2) == [0, 2]
        assert job.finish([0, 2]) == 0
    assert "worker 1 (node 0) exited: killed by SIGKILL" in job.output()


@proves(Kind.AGENT, Promise.NOBODY_LOST)
def test_the_next_agent_knows_which_losses_were_told(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start() as job:
        job.kill(1)
        assert ranks_of(job, [0, 2, 3], 2) == [0, 2, 3]
        job.said("worker 1 (node 0) exited: killed by SIGKILL; the job goes on with 3 workers")
        job.tell(0, "seal 1")
        job.one("copied", 0, step=1)  # what it has said is stored once it hears the next frame
        job.kill_agent(0)
        job.next_agent(0, 1)
        job.kill(2)
        assert ranks_of(job, [0, 3], 3) == [0, 3]
        for slot in (0, 3):
            job.tell(slot, "complete 5")
        assert job.code() == 0
    assert [event["slot"] for event in job.events("worker_exited")][:2] == [1, 2]
    assert len(job.events("worker_exited")) == 4
    assert job.output().count("worker 1 (node 0) exited") == 1
    assert "the job is done: 5 steps completed, 2 losses survived" in job.output()


@proves(Kind.AGENT, Promise.NOBODY_LOST)
def test_the_last_word_of_a_trainer_is_heard_by_the_next_agent(tmp_path: Path) -> None:
    """One that is stopped reads nothing of what its trainers say before they exit."""
    with Job(tmp_path, 4).start(nodes=2) as job:
        job.stop_agent(2)
        assert job.finish(range(4)) == job.code(1) == 0
        assert job.left(WAIT_S) == []
    assert [event["life"] for event in job.events("agent_started")] == [0, 0, 1]
    assert job.events("worker_raised") == []
    assert [event["epoch"] for event in job.events("view_committed")] == [1]


@proves(Kind.AGENT, Promise.GOES_ON)
def test_the_next_agent_starts_the_trainer_again_that_was_to_come(tmp_path: Path) -> None:
    with Job(tmp_path, 3, TINY_RESPAWN="3").start() as job:
        job.kill(1)
        assert ranks_of(job, [0, 2], 2) == [0, 2]
        job.kill_agent(0)  # it waits half a second before it starts the next one
        job.next_agent(0, 1)
        assert not [e for e in job.events("worker_started") if e["incarnation"]]
        assert job.one("started", 1)["pid"] != job.pids[1]
        assert job.finish([0, 2]) == 0
    assert len(job.events("worker_started")) == 4


@proves(Kind.AGENT, Promise.GOES_ON)
def test_the_next_agent_lets_a_newcomer_in_that_was_about_to_enter(tmp_path: Path) -> None:
    """The view with it that was proposed comes to nothing: it is proposed again."""
    with Job(tmp_path, 3, TINY_RESPAWN="3").start() as job:
        job.kill(1)
        assert ranks_of(job, [0, 2], 2) == [0, 2]
        job.one("ring", 1, epoch=3)
        assert "joins as 1.1" in job.events("view_proposed")[-1]["reason"]
        job.kill_agent(0)
        job.next_agent(0, 1)
        without = job.all("commit", [0, 2])
        assert {one["reason"] for one in without} == {
            "worker 1 (node 0) left: it had not been let in yet"
        }
        assert let_in(job, 1, [0, 2], epoch=without[0]["epoch"] + 1) == [0, 1, 2]
        assert job.finish([0, 1, 2]) == 0
    assert len(job.events("worker_started")) == 4


@proves(Kind.AGENT, Promise.NOBODY_LOST)
def test_an_agent_that_dies_while_a_view_is_agreed_on_finishes_that(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=2) as job:
        job.tell(2, "deaf")
        job.one("deaf", 2)
        job.kill(1)
        job.all("ring", [0, 2, 3], epoch=2)
        job.kill_agent(0, 2)  # the one that leads, and the other one
        job.next_agent(0, 1)
        job.next_agent(1, 1)
        job.tell(2, "answer")
        last = {slot: job.one("commit", slot) for slot in (0, 2, 3)}
        assert {tuple(one["ranks"]) for one in last.values()} == {(0, 2, 3)}
        assert job.finish([0, 2, 3]) == 0


@proves(Kind.NODE, Promise.GOES_ON, victim="1")
def test_a_trainer_that_its_killed_guardian_does_not_take_along_is_told(tmp_path: Path) -> None:
    """The kernel kills the script with it; its child is in a session of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\n"
        f"command = [sys.executable, {str(TRAINER)!r}]\n"
        "subprocess.run(command, close_fds=False, start_new_session=True, check=True)\n"
    )
    with Job(tmp_path / "job", 2) as job:
        options = (f"--dir={job.run_dir}", "--nnodes=2", f"--master-port={free_port()}")
        for node in range(2):
            command = [sys.executable, "-c", LAUNCH, *options, f"--node-rank={node}", str(script)]
            job.launch(command=command)
        job.joined()
        job.kill_node(1)
        gone = "the agent of this worker's node is gone: "
        while not job.one("ring", 1)["reason"].startswith(gone):
            pass  # one of an earlier view
        assert job.one("stopped", 1)["reason"].startswith(gone)
        assert job.ended(job.pids[1])
        assert ranks_of(job, [0], 2) == [0]
        assert job.finish([0]) == 0


@proves(Kind.NODE, Promise.GOES_ON, victim="0")
def test_the_next_node_leads_when_the_leader_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=4) as job:
        job.kill_node(0)
        assert ranks_of(job, [1, 2, 3], 2) == [1, 2, 3]
        job.kill(2)
        assert ranks_of(job, [1, 3], 3) == [1, 3]
        assert job.finish([1, 3], launcher=1) == 0
    assert [event["by"] for event in job.events("view_committed")] == [0, 1, 1]


@proves(Kind.KILL, Promise.GOES_ON)
def test_a_trainer_killed_while_it_writes_a_control_message(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, "half")
        reports = job.all("commit", [0, 2], epoch=2)
        steps = [(r["owner"], r["step"]) for r in reports[0]["inventory"] if not r["is_copy"]]
        assert steps == [(0, 0), (1, 0), (2, 0)]
        assert job.finish([0, 2]) == 0


@proves(Kind.HANG, Promise.GOES_ON, victim="1")
def test_a_trainer_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, 3, "--quiesce-timeout-s=1").start() as job:
        job.tell(2, "deaf")
        job.one("deaf", 2)
        job.kill(1)
        report = job.one("commit", 0, epoch=3)
        assert report["ranks"] == [0]
        evidence = "did not answer the proposal of view 2 within 1 s"
        assert report["reason"].endswith(f"worker 2 (node 0) exited: {evidence}")
        assert job.finish([0]) == 0
    assert job.events("worker_exited")[1]["evidence"] == evidence


@proves(Kind.NOISE, Promise.NOBODY_LOST, victim="1")
def test_an_announced_phase_is_waited_for(tmp_path: Path) -> None:
    with Job(tmp_path, 3, "--quiesce-timeout-s=1").start() as job:
        job.tell(2, "work 3 evaluation")
        job.one("works", 2)
        at_s = job.kill(1)
        reports = job.all("commit", [0, 2], epoch=2)
        assert {tuple(report["ranks"]) for report in reports} == {(0, 2)}
        assert min(report["at_s"] for report in reports) - at_s > 2
        assert job.finish([0, 2]) == 0
    assert job.output().count("worker 2 is in an announced phase (evaluation)") == 1
    assert [e["announced_phase"] for e in job.events("awaited")] == ["evaluation"]


@proves(Kind.HANG, Promise.GOES_ON, victim="1")
@pytest.mark.parametrize("order", ["work 20", "wedge"])
def test_silence_and_a_wedged_announced_phase_are_not(tmp_path: Path, order: str) -> None:
    with Job(tmp_path, 3, "--quiesce-timeout-s=1").start() as job:
        job.tell(2, order)
        job.one("works", 2)
        job.kill(1)
        report = job.one("commit", 0, epoch=3)
        assert report["ranks"] == [0]
        assert "did not answer the proposal of view 2 within 1 s" in report["reason"]
        assert job.finish([0]) == 0


@proves(Kind.HANG, Promise.GOES_ON)
def test_a_trainer_that_finishes_and_hangs_is_killed_as_done(tmp_path: Path) -> None:
    with Job(tmp_path, 2, "--finish-grace-s=0.5").start() as job:
        job.tell(0, "hang")
        assert job.ended(job.pids[0])
        assert job.finish([1]) == 0
        assert job.left(WAIT_S) == []
    assert "worker 0 had finished and did not exit within 0.5 s: killed" in job.output()
    assert job.events("job_over")[0]["reason"] == "all workers have finished"


@proves(Kind.AGENT, Promise.NOBODY_LOST)
def test_an_agent_that_is_stopped_is_ended_and_followed_by_another(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start(nodes=2) as job:
        job.stop_agent(0)
        with within(2.0):
            job.next_agent(0, 1)
        assert all(job.nothing("commit", slot, for_s=0.5) for slot in range(4))
        assert job.finish(range(4)) == 0
        assert job.left(WAIT_S) == []
    assert f"the agent (pid {job.agents[0]}) has stood still for 1." in job.output()


@proves(Kind.HANG, Promise.GOES_ON)
def test_a_node_that_is_stopped_is_lost(tmp_path: Path) -> None:
    with Job(tmp_path, 3, "--heartbeat-timeout-s=2").start(nodes=3) as job:
        job.launchers[0].send_signal(signal.SIGSTOP)
        job.stop_agent(0)
        assert ranks_of(job, [1, 2], 2) == [1, 2]
        job.kill_node(0)
        assert job.finish([1, 2], launcher=1) == 0
        assert job.left(WAIT_S) == []
    assert "was silent for 2 s" in job.output(1)


def test_an_agent_loads_nothing_heavy(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start() as job:
        for pid in {*job.agents.values()}:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            resident_mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            # 3.7 of them are OpenSSL's, which Python takes SHA-256 from: the handshakes need it.
            assert resident_mib < 24
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert not any(name in mapped for name in ("torch", "numpy", "pydantic_core"))
        assert job.finish([0, 1]) == 0
    code = (
        "import sys, elaswave_plugin.agent.agent_process, elaswave_plugin.run;"
        "print(sorted({'torch', 'pydantic', 'typer', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@proves(Kind.KILL, Promise.GOES_ON)
@pytest.mark.slow
def test_from_kill_to_commit_takes_milliseconds(tmp_path: Path) -> None:
    """SIGKILL -> pidfd -> leader -> doorbells -> quiesced -> commit at every trainer."""
    rung_s, agreed_s = [], []
    for attempt in range(20):
        with Job(tmp_path / str(attempt), 4).start() as job:
            at_s = job.kill(attempt % 4)
            rest = [slot for slot in range(4) if slot != attempt % 4]
            rung_s.append(max(r["at_s"] for r in job.all("ring", rest, epoch=2)) - at_s)
            agreed_s.append(max(r["at_s"] for r in job.all("commit", rest, epoch=2)) - at_s)
            assert job.finish(rest) == 0
    for what, times_s in (("doorbells", rung_s), ("committed", agreed_s)):
        ms = [1000 * time_s for time_s in times_s]
        print(f"{what}: median {statistics.median(ms):.1f} ms, max of 20 {max(ms):.1f} ms")
    idle = os.getloadavg()[0] < 1.0
    assert statistics.median(agreed_s) < (AGREED_S if idle else AGREED_LOADED_S)


@proves(Kind.KILLS, Promise.STOPS, victim="1")
def test_the_job_stops_when_no_trainer_is_left(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start() as job:
        job.kill(1)
        job.one("commit", 0, epoch=2)
        job.kill(0)
        assert job.code() == 1
        assert job.left(WAIT_S) == []
    assert "no live worker remains" in job.output()
    assert job.events("job_over")[0]["exit_code"] == 1


@proves(Kind.RAISE, Promise.STOPS)
@pytest.mark.parametrize("at_once", [True, False])
def test_workers_that_fail_alike_end_the_job_once(tmp_path: Path, at_once: bool) -> None:
    """Also where the second one fails only when it is on its own."""
    with Job(tmp_path, 2, TINY_RESPAWN="10").start() as job:
        job.tell(1, "raise")
        if not at_once:
            job.one("commit", 0, epoch=2)
        job.tell(0, "raise")
        assert job.code() == 1
        assert job.left(WAIT_S) == []
    said = "the job stops: all workers failed alike before the first step: RuntimeError: as told"
    assert job.output().count(said) == 1
    assert job.output().count("Traceback (most recent call last)") == 1
    assert "no live worker remains" not in job.output()
    assert {event["incarnation"] for event in job.events("worker_started")} == {0}


@proves(Kind.RAISE, Promise.GOES_ON)
def test_the_exception_of_one_worker_is_shown_once_and_is_its_loss(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, "raise")
        assert (
            "exited: exit code 1, RuntimeError: as told (tiny_trainer.py:"
            in (job.one("commit", 0, epoch=2)["reason"])
        )
        job.one("commit", 2, epoch=2)
        assert job.finish([0, 2]) == 0
    assert job.output().count("Traceback (most recent call last)") == 1
    assert "failed alike" not in job.output()


@proves(Kind.KILL_AT_START, Promise.REQUEUE, victim="1")
def test_a_loss_before_the_first_snapshots_stops_the_job_for_a_requeue(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start(sealed=False) as job:
        job.kill(1)
        assert job.code() == 75
        assert job.left(WAIT_S) == []
        stopped = job.one("stopped", 0)
    sentence = "worker 1: killed by SIGKILL; the first snapshot of every worker was not sealed yet"
    assert sentence in stopped["reason"]
    assert job.output().count(sentence) == 1


@proves(Kind.RAISE, Promise.STOPS)
def test_exit_code_2_stops_the_whole_job_with_2(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, "exit 2")
        assert job.code() == 2
        assert job.left(WAIT_S) == []


@proves(Kind.RAISE, Promise.STOPS)
def test_a_trainer_can_stop_a_job_that_cannot_go_on(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, "abandon")
        assert job.code() == 1
    assert job.output().count("the job stops: worker 1: shards 3 and 4 are gone") == 1


@proves(Kind.RAISE, Promise.GOES_ON)
def test_an_exit_with_0_in_the_middle_is_a_loss(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, "exit 0")
        assert job.one("commit", 0, epoch=2)["reason"] == (
            "worker 1 (node 0) exited: exit code 0 before its work was finished"
        )
        job.one("commit", 2, epoch=2)
        assert job.finish([0, 2]) == 0


@proves(Kind.RAISE, Promise.GOES_ON)
def test_what_a_trainer_has_started_ends_also_where_it_exits_with_0(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        started = []
        for slot in range(3):
            job.tell(slot, "start")
            started.append(job.one("start", slot)["pid"])
            job.watch(started[-1])
        job.tell(1, "exit 0")
        job.all("commit", [0, 2], epoch=2)
        assert job.ended(started[1])
        assert job.finish([0, 2]) == 0
        assert job.left(0) == []


@proves(Kind.RAISE, Promise.GOES_ON)
@pytest.mark.parametrize(
    ("frame", "flaw"),
    [
        ("sing", "'sing', unknown here"),
        ("severed", "'severed' without 'epoch'"),
        ("severed epoch=soon evidence=none", "'severed' with epoch 'soon'"),
    ],
)
def test_a_trainer_of_another_version_is_lost_with_the_reason(
    tmp_path: Path, frame: str, flaw: str
) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(1, f"say {frame}")
        assert job.one("commit", 0, epoch=2)["reason"] == (
            f"worker 1 (node 0) exited: it said {flaw}: have all run the same version"
            " of elaswave_plugin"
        )
        assert job.finish([0, 2]) == 0


@proves(Kind.LEAVE, Promise.GOES_ON)
def test_a_planned_departure_is_no_death(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.tell(0, "leave")
        reports = job.all("commit", [1, 2], epoch=2)
        assert {r["reason"] for r in reports} == {"worker 0 (node 0) left: as planned"}
        assert {r["ranks"][0] for r in reports} == {1}
        assert job.finish([1, 2]) == 0


@proves(Kind.KILL, Promise.GOES_ON, victim="2")
def test_a_loss_while_some_have_finished(tmp_path: Path) -> None:
    with Job(tmp_path, 4).start() as job:
        job.tell(0, "finish")
        assert job.ended(job.pids[0])
        assert job.launchers[0].poll() is None
        job.kill(2)
        assert ranks_of(job, [1, 3], 2) == [1, 3]
        assert job.finish([1, 3]) == 0
