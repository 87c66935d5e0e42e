"""Nodes that take the places of lost ones: `elaswave run --join`, and what it refuses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaswave_plugin.agent.peers.same_program import describe_program, difference
from elaswave_plugin.cli.main import run_command
from elaswave_plugin.cli.status import addresses_in, ask_job
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_REQUEUE
from elaswave_plugin.ipc.address_file import read_addresses
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from elaswave_plugin.version import __version__
from tests.agent.jobs import LAUNCH, TRAINER, WAIT_S, Job, environment
from tests.idle import Deadline
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def address_of(job: Job, node: int) -> str:
    """Return the address at which the agent of a node answers."""
    return next(str(one) for one in read_addresses(job.run_dir) if one.node == node)


def lose(job: Job, node: int, rest: list[int], epoch: int = 2) -> None:
    """Kill the guardian of a node, and all of the node with it, until the others have agreed."""
    job.launchers[node].kill()
    job.all("commit", rest, epoch=epoch)


def join(job: Job, contact: int, *options: str) -> int:
    """Start a launcher that joins by way of a node's agent; its number, which is its node's too."""
    job.launch(f"--join={address_of(job, contact)}", *options)
    return len(job.launchers) - 1


def let_in(job: Job, slot: int, rest: list[int], epoch: int) -> list[object]:
    """Have the others come to the next boundary, where the newcomer enters; its commit."""
    for one in rest:
        job.tell(one, "step 1")
    reports = job.all("commit", [*rest, slot], epoch=epoch)
    assert len({tuple(report["ranks"]) for report in reports}) == 1
    return list(reports[-1]["ranks"])


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
@pytest.mark.parametrize("victim", sampled([0, 2]))
def test_a_lost_node_comes_back(tmp_path: Path, victim: int) -> None:
    with Job(tmp_path, 3).start(nodes=3) as job:
        rest = [slot for slot in range(3) if slot != victim]
        for slot in rest:
            job.tell(slot, "remember run_id fox")
        job.all("remember", rest)
        lose(job, victim, rest)
        number = join(job, rest[0])
        detached = job.one("detached", victim)
        assert detached["job_constants"]["run_id"] == "fox"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ELASWAVE_INCARNATION")
        assert [detached["env"][name] for name in names] == [str(victim), "0", "3", "3", "1"]
        assert number == 3
        assert let_in(job, victim, rest, 3) == [0, 1, 2]
        shown = ask_job(addresses_in(job.run_dir), WAIT_S)["view"]
        assert shown["nodes"] == [3 if slot == victim else slot for slot in range(3)]
        # It is a node as any other now: with it, two of three are a majority.
        last = sorted([victim, rest[0]])
        lose(job, rest[1], last, epoch=4)
        assert job.finish(last, launcher=number) == 0
        assert job.code(rest[0]) == 0
    assert read_addresses(job.run_dir) == []
    assert [event["slots"] for event in job.events("node_admitted")] == [[victim]]


@proves(Kind.LEAVE, Promise.ENDS_WELL)
def test_a_newcomer_that_leaves_as_it_was_told_to_ends_well(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--reserve=1") as job:
        number = join(job, 0)
        job.one("detached", 2)
        assert let_in(job, 2, [0, 1], 2) == [0, 1, 2]
        assert run_command(["drain", "2", str(job.run_dir)]) == 0
        for slot in range(3):
            job.tell(slot, "step 2")
        job.all("commit", [0, 1], epoch=3)
        for slot in (0, 1):
            job.tell(slot, "release")
        assert job.code(number) == 0, job.output(number)
        assert job.finish([0, 1]) == 0


@proves(Kind.NODE_RETURN, Promise.GOES_ON, victim="1")
def test_two_come_at_once_with_one_node(tmp_path: Path) -> None:
    with Job(tmp_path, 4, TINY_READY="told").start(nodes=2) as job:
        lose(job, 1, [0, 1])
        number = join(job, 0, "--nproc-per-node=2")
        job.all("detached", [2, 3])
        shown = ask_job(addresses_in(job.run_dir), WAIT_S)
        assert [worker["node"] for worker in shown["workers"]] == [0, 0, 2, 2]
        for slot in (0, 1):
            job.tell(slot, "finish")
        assert job.code() == 0
        assert job.code(number) == 0


# A launcher that waits, once it was offered slots, until others have taken them.
LATE = """
import sys, time
from pathlib import Path
from elaswave_plugin.launch import launch, node_job
find_vacancy = node_job.find_vacancy
def find_late(spec):
    vacancy = find_vacancy(spec)
    Path("{folder}/offered").touch()
    deadline_s = time.monotonic() + 60
    while not Path("{folder}/taken").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return vacancy
node_job.find_vacancy = find_late
sys.exit(launch.main(sys.argv[1:]))
"""


@proves(Kind.JOIN, Promise.GOES_ON)
@pytest.mark.parametrize("reserve", [2, 1])
def test_two_launchers_are_offered_the_same_slot(tmp_path: Path, reserve: int) -> None:
    """The second one takes another slot, where one is left."""
    with Job(tmp_path, 2, TINY_READY="told").start(f"--reserve={reserve}") as job:
        late = [f"--join={address_of(job, 0)}", f"--dir={job.run_dir}", str(TRAINER)]
        job.launch(command=[sys.executable, "-c", LATE.format(folder=tmp_path), *late])
        second = len(job.launchers) - 1
        deadline = Deadline(WAIT_S)
        while not (tmp_path / "offered").exists():
            assert deadline.left_s()
            time.sleep(0.01)
        first = join(job, 0)
        job.one("detached", 2)
        (tmp_path / "taken").touch()
        if reserve == 1:
            assert job.code(second) == EXIT_REQUEUE
            assert "does not join: others have taken the free slots" in job.output(second)
        else:
            env = job.one("detached", 3)["env"]
            assert [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "0", "2"]
        for slot in (0, 1):
            job.tell(slot, "finish")
        assert job.code() == 0 and job.code(first) == 0
        assert reserve == 1 or job.code(second) == 0


@proves(Kind.NEWCOMER, Promise.GOES_ON)
@pytest.mark.parametrize("what", sampled(["trainer", "guardian"]))
def test_a_newcomer_dies_before_it_enters(tmp_path: Path, what: str) -> None:
    with Job(tmp_path, 3).start(nodes=3) as job:
        lose(job, 2, [0, 1])
        number = join(job, 1)
        job.one("detached", 2)
        job.one("ring", 2, epoch=3)
        if what == "trainer":
            os.kill(job.events("worker_started")[-1]["pid"], signal.SIGKILL)
            assert job.code(number) == 1
        else:
            job.launchers[number].kill()
        # The others go on as they were, and the slot is free again.
        job.all("commit", [0, 1], epoch=4)
        join(job, 0)
        detached = job.one("detached", 2)
        assert detached["env"]["ELASWAVE_INCARNATION"] == "2"
        assert let_in(job, 2, [0, 1], 5) == [0, 1, 2]
        assert job.finish([0, 1, 2]) == 0


@proves(Kind.NEWCOMER, Promise.GOES_ON)
def test_the_agent_of_a_newcomer_dies_before_it_enters(tmp_path: Path) -> None:
    """Another one goes on for it."""
    with Job(tmp_path, 3).start(nodes=3) as job:
        lose(job, 2, [0, 1])
        number = join(job, 1)
        job.one("detached", 2)
        job.one("ring", 2, epoch=3)
        os.kill(job.events("worker_started")[-1]["agent_pid"], signal.SIGKILL)
        assert let_in(job, 2, [0, 1], 3) == [0, 1, 2]
        assert job.finish([0, 1, 2]) == 0 and job.code(number) == 0
        assert [event["life"] for event in job.events("agent_started")][-1] == 1


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
@pytest.mark.parametrize("life", [0, 1])
def test_the_worker_of_a_node_that_came_later_is_started_again(tmp_path: Path, life: int) -> None:
    """Also by the next agent of the node, which knows what the job has told the one before."""
    with Job(tmp_path, 3, TINY_RESPAWN="1").start(nodes=3) as job:
        lose(job, 2, [0, 1])
        number = join(job, 1)
        pid = job.one("started", 2)["pid"]
        assert let_in(job, 2, [0, 1], 3) == [0, 1, 2]
        if life:
            os.kill(job.events("worker_started")[-1]["agent_pid"], signal.SIGKILL)
            job.said("another one goes on", number)
        os.kill(pid, signal.SIGKILL)
        job.all("commit", [0, 1], epoch=4)
        job.one("detached", 2)
        detached = job.one("detached", 2)
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "ELASWAVE_INCARNATION")
        assert [detached["env"][name] for name in names] == ["2", "3", "3", "0", "2"]
        for slot in (0, 1):
            job.tell(slot, "step 2")
        job.all("commit", [0, 1, 2], epoch=5)
        assert job.finish([0, 1, 2]) == 0
        assert job.code(number) == 0


@proves(Kind.ZOMBIE, Promise.GOES_ON)
def test_a_zombie_has_no_part_in_the_job_of_its_successor(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start("--heartbeat-timeout-s=2", "--quorum-wait-s=0.5", nodes=3) as job:
        job.launchers[2].send_signal(signal.SIGSTOP)  # else it starts another agent
        job.stop_agent(2)
        job.all("commit", [0, 1], epoch=2)
        number = join(job, 1)
        job.one("detached", 2)
        assert let_in(job, 2, [0, 1], 3) == [0, 1, 2]
        os.kill(job.agents[2], signal.SIGCONT)
        job.launchers[2].send_signal(signal.SIGCONT)
        assert job.ended(job.agents[2])
        assert job.code(2) == 1
        # What it leaves behind is not its successor's.
        assert [one.node for one in read_addresses(job.run_dir)] == [0, 1, number]
        shown = ask_job(addresses_in(job.run_dir), WAIT_S)
        assert shown["view"]["epoch"] == 3
        assert [worker["suspicion"] for worker in shown["workers"]] == [None, None, None]
        assert job.finish([0, 1, 2]) == 0
        assert job.code(number) == 0


def refusal(job: Job, *words: str) -> str:
    """The sentence with which a launcher that joins refuses."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *words],
        env=environment(TINY_FOLDER=str(job.folder)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_what_cannot_join_is_refused_in_a_sentence(tmp_path: Path) -> None:
    script = str(TRAINER)
    with Job(tmp_path, 3).start(nodes=3) as job:
        there = f"--join={address_of(job, 1)}"
        said = refusal(job, there, script)
        assert "--nproc-per-node is 1, and 0 of the job's 3 slots are free" in said
        assert "or launch the job with a --reserve of more than 0" in said
        lose(job, 2, [0, 1])
        said = refusal(job, there, "--nproc-per-node=2", script)
        assert "--nproc-per-node is 2, and 1 of the job's 3 slots are free" in said
        assert "--reserve is the job's own: leave it out with --join" in refusal(
            job, there, "--reserve=2", script
        )
        differs = "after the script's name the script gets '--lr' here and nothing in the job: give"
        assert differs in refusal(job, there, script, "--lr", "1")
        assert "the job runs tiny_trainer.py, and the jobs.py here differs" in refusal(
            job, there, str(TRAINER.with_name("jobs.py"))
        )
        assert "--heartbeat-timeout-s is the job's own: leave it out with --join" in refusal(
            job, there, "--heartbeat-timeout-s=9", script
        )
        assert "--join takes part at once and --standby waits" in refusal(
            job, there, "--standby=1", script
        )
        job.tell(0, "finish")
        assert job.ended(job.pids[0])
        assert "is ending: no worker can join it" in refusal(job, there, script)
        assert job.finish([1]) == 0
        nowhere = f"127.0.0.1:{free_port()}"
        said = refusal(job, f"--join={nowhere}", script)
        assert f"--join is {nowhere}, where no agent of a job answers" in said
        assert "wanted HOST:PORT of an agent" in refusal(job, "--join=there", script)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_another_version_of_the_package_does_not_join(tmp_path: Path) -> None:
    """It ends with one sentence before it starts anything, and the job goes on."""
    with Job(tmp_path, 2).start(nodes=2) as job:
        lose(job, 1, [0])
        other = f"from elaswave_plugin import version; version.__version__ = '9.9'; {LAUNCH}"
        there = [f"--dir={job.run_dir}", f"--join={address_of(job, 0)}", str(TRAINER)]
        newcomer = job.launch(command=[sys.executable, "-c", other, *there])
        assert newcomer.wait(WAIT_S) == EXIT_CONFIGURATION
        said = (tmp_path / f"output-{len(job.launchers) - 1}").read_text().splitlines()
        assert said == [
            f"elaswave run: the job runs version {__version__} of elaswave_plugin, and this is"
            " version 9.9: install the job's version here"
        ]
        # The slot is free as before: one of the job's version takes it.
        number = join(job, 0)
        job.one("detached", 1)
        assert let_in(job, 1, [0], 3) == [0, 1]
        assert job.finish([0, 1]) == 0 and job.code(number) == 0


def test_the_first_difference_of_two_command_lines_is_named() -> None:
    def described(*args: str) -> dict[str, object]:
        return describe_program(Program(script="train", args=args, module=True))

    job = described("--steps=10", "--lr", "1", "--elaswave-dir", "/job")
    for words, said in (
        (("--steps=10", "--lr", "2", "x"), "after '--lr' the script gets '2' here and '1' in the"),
        (("--steps=10", "--lr"), "after '--lr' the script gets nothing here and '1' in the job"),
        (("--lr", "1"), "after the script's name the script gets '--lr' here and '--steps=10' in"),
    ):
        assert said in str(difference(described(*words), job))
    for place in ((), ("--elaswave-dir=/elsewhere",), ("--elaswave-dir", "/elsewhere")):
        assert difference(described("--steps=10", *place, "--lr", "1"), job) is None


@proves(Kind.JOIN, Promise.GOES_ON)
def test_a_newcomer_may_have_a_run_directory_of_its_own(tmp_path: Path) -> None:
    """The settings of a script reach its agents: the job's has none of its own here."""
    with Job(tmp_path, 2, TINY_READY="told") as job:
        command = [sys.executable, "-c", LAUNCH]
        there = [str(TRAINER), f"--elaswave-dir={job.run_dir}"]
        port = f"--master-port={free_port()}"
        for node in range(2):
            job.launch(command=[*command, "--nnodes=2", f"--node-rank={node}", port, *there])
        job.joined()
        lose(job, 1, [0])
        own = [str(TRAINER), "--elaswave-dir", str(tmp_path / "own")]
        job.launch(command=[*command, f"--join={address_of(job, 0)}", *own])
        job.one("detached", 1)
        job.tell(1, "ready")
        assert let_in(job, 1, [0], 3) == [0, 1]
        assert job.finish([0, 1]) == 0 and job.code(2) == 0
    kinds = [event["kind"] for event in read_lines(tmp_path / "own" / EVENTS_FILE)]
    assert kinds[0] == "node_joins" and "worker_started" in kinds


@proves(Kind.JOIN, Promise.GOES_ON)
def test_a_newcomer_takes_a_slot_of_the_reserve(tmp_path: Path) -> None:
    """Also one that is told another reserve; the job's other slots stay whose they are."""
    env = {"ELASWAVE_RESERVE": "7", "TINY_READY": "told"}
    with Job(tmp_path, 3, **env).start("--reserve=2", nodes=3) as job:
        assert ask_job(addresses_in(job.run_dir), WAIT_S)["vacant"] == [3, 4]
        number = join(job, 1)
        detached = job.one("detached", 3)
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ELASWAVE_INCARNATION", "ELASWAVE_RESERVE")
        # Ranks that a script knows are those of the launch.
        assert [detached["env"][name] for name in names] == ["2", "3", "3", "1", "2"]
        job.tell(3, "ready")
        assert let_in(job, 3, [0, 1, 2], 2) == [0, 1, 2, 3]
        shown = ask_job(addresses_in(job.run_dir), WAIT_S)
        assert shown["vacant"] == [4] and len(shown["workers"]) == 4
        # A leader that has not led before knows of it, and of the slot that is left.
        lose(job, 0, [1, 2, 3], epoch=3)
        join(job, 3, "--nproc-per-node=2")
        assert job.one("detached", 0)["env"]["RANK"] == "0"
        assert job.one("detached", 4)["env"]["RANK"] == "2"
        assert ask_job(addresses_in(job.run_dir), WAIT_S)["vacant"] == []
        for slot in (1, 2, 3):
            job.tell(slot, "finish")
        assert job.code(number) == 0
    assert read_addresses(job.run_dir) == []


@proves(Kind.JOIN, Promise.GOES_ON)
@pytest.mark.slow
def test_a_standby_leaves_the_reserve_to_those_who_join(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--reserve=1", "--standby=1") as job:
        await_standby(job, {0: 1})
        number = join(job, 0)
        job.one("detached", 2)
        assert let_in(job, 2, [0, 1], 2) == [0, 1, 2]
        await_standby(job, {0: 1})
        # From now on it is a slot like any other.
        lose(job, number, [0, 1], epoch=3)
        assert job.one("detached", 2)["env"]["ELASWAVE_INCARNATION"] == "2"
        assert let_in(job, 2, [0, 1], 4) == [0, 1, 2]
        await_standby(job, {})
        for slot in range(3):
            job.tell(slot, "finish")
        assert job.code() == 0


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_nodes_that_disagree_on_the_reserve_do_not_start(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        port = f"--master-port={free_port()}"
        job.launch("--node-rank=0", "--nnodes=2", port, "--reserve=2")
        job.launch("--node-rank=1", "--nnodes=2", port, "--reserve=1")
        assert job.code(1) == EXIT_CONFIGURATION
        said = job.output(1)
        assert "its reserve is 1, that of node 0 is 2: give every node the same" in said


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
def test_a_standby_takes_a_slot_by_itself(tmp_path: Path) -> None:
    with Job(tmp_path, 4) as job:
        port = free_port()
        for node, standby in enumerate((0, 2, 0, 0)):
            place = (f"--node-rank={node}", "--nnodes=4", f"--master-port={port}")
            job.launch(*place, f"--standby={standby}")
        job.joined()
        await_standby(job, {1: 2})
        lose(job, 3, [0, 1, 2])
        detached = job.one("detached", 3)
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ELASWAVE_INCARNATION")
        # After the one worker of its node.
        assert [detached["env"][name] for name in names] == ["3", "1", "1", "1"]
        assert let_in(job, 3, [0, 1, 2], 3) == [0, 1, 2, 3]
        # One is left, and the next loss is made up for, too.
        await_standby(job, {1: 1})
        lose(job, 0, [1, 2, 3], epoch=4)
        assert job.one("detached", 0)["env"]["LOCAL_RANK"] == "2"
        for slot in (1, 2, 3):
            job.tell(slot, "step 2")
        job.all("commit", [0, 1, 2, 3], epoch=5)
        for slot in range(4):
            job.tell(slot, "finish")
        assert [job.code(number) for number in (1, 2)] == [0, 0]
    assert read_addresses(job.run_dir) == []


@proves(Kind.NODE_RETURN, Promise.GOES_ON)
def test_the_next_life_of_an_agent_has_its_idle_places_still(tmp_path: Path) -> None:
    """And the worker that it had started in one of them."""
    with Job(tmp_path, 3) as job:
        port = free_port()
        for node, standby in enumerate((2, 0, 0)):
            place = (f"--node-rank={node}", "--nnodes=3", f"--master-port={port}")
            job.launch(*place, f"--standby={standby}")
        job.joined()
        await_standby(job, {0: 2})
        lose(job, 2, [0, 1])
        job.one("detached", 2)
        assert let_in(job, 2, [0, 1], 3) == [0, 1, 2]
        job.kill_agent(0)
        assert job.ended(job.agents[0])
        await_standby(job, {0: 1})
        for slot in range(3):
            job.tell(slot, "finish")
        assert [job.code(number) for number in (0, 1)] == [0, 0]


@proves(Kind.NOTHING, Promise.CLEAN)
def test_idle_places_end_with_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, 2).start("--standby=2") as job:
        await_standby(job, {0: 2})
        assert job.finish([0, 1]) == 0
        assert job.left(WAIT_S) == []


@proves(Kind.NODE_RETURN, Promise.GOES_ON, victim="0")
def test_a_standby_that_was_not_needed_does_not_speak_for_its_node(tmp_path: Path) -> None:
    """Nobody was left to make up for the loss: the job has failed."""
    with Job(tmp_path, 1).start("--standby=1") as job:
        await_standby(job, {0: 1})
        job.kill(0)
        assert job.code() == 1


def await_standby(job: Job, places: dict[int, int]) -> None:
    """Until the status shows so many idle places of these nodes."""
    deadline = Deadline(WAIT_S)
    while True:
        found = ask_job(addresses_in(job.run_dir), WAIT_S)["standbys"]
        if {one["node"]: one["places"] for one in found} == places:
            return
        assert deadline.left_s(), found
        time.sleep(0.05)  # the status is all that shows them
