"""`elaswave status` of a job that trains, before and after the loss of a worker."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elaswave_plugin.cli.status import ask_job, find_job
from elaswave_plugin.config import STEP_PHASES
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from tests.faults.harness import JobSpec, Zygote, left_alive, pids_of, started
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves

ENDLESS: JobSpec = replace(PP2_DP2, nodes=4, steps=100_000, dump="never")
# A replacement that has built all asks to be let in once a file is there: until then it builds.
BUILDS_UNTIL_SEEN = """
import pathlib, time
from elaswave_plugin.trainer.member import Member
ready_now = Member.ready
def ready_once_seen(self, facts):
    deadline_s = time.monotonic() + 60
    while not pathlib.Path("seen").exists():
        assert time.monotonic() < deadline_s, "nobody has asked for the status"
        time.sleep(0.005)
    ready_now(self, facts)
Member.ready = ready_once_seen
"""
Status = dict[str, Any]


def ask_until(directory: Path, fits: Callable[[Status], bool]) -> Status:
    """Ask a training job until its status is as wanted."""
    deadline = Deadline(LIMIT_S)
    while True:
        status = ask_job(find_job(directory, None), LIMIT_S)
        if fits(status):
            return status
        assert deadline.left_s(), status


def survivors_have_sealed(status: Status) -> bool:
    """Since the loss of worker 1."""
    workers = [worker for worker in status["workers"] if worker["slot"] != 1]
    return all(worker["snapshot"]["epoch"] == 2 for worker in workers)


@proves(Kind.KILL, Promise.STATUS)
def test_the_status_of_a_pipeline_before_and_after_a_kill(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    with started(ENDLESS, zygote=zygote, data=data, directory=tmp_path) as launchers:
        wait_for_step(tmp_path, 3)
        before = ask_job(find_job(tmp_path, None), LIMIT_S)
        os.kill(before["workers"][1]["trainer_pid"], signal.SIGKILL)
        after = ask_until(tmp_path, survivors_have_sealed)
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        assert [launcher.wait(LIMIT_S) for launcher in launchers] == 4 * [143]
    assert left_alive(pids_of(tmp_path), limit_s=LIMIT_S) == ()
    assert list(tmp_path.glob("agent-*")) == []
    assert before["view"]["ranks"] == [0, 1, 2, 3]
    assert ParallelLayout.from_json(before["layout"]).widths == (2, 2)
    assert all(worker["step"] >= 3 for worker in before["workers"])
    # A copy of each snapshot lies with the other worker of the same stage, on another node.
    holders = [[one["slot"] for one in w["snapshot"]["held_by"]] for w in before["workers"]]
    assert holders == [[1], [0], [3], [2]]
    assert [(one["node"], one["life"], one["slots"]) for one in before["nodes"]] == [
        (node, 0, [node]) for node in range(4)
    ]
    assert after["view"]["ranks"] == [0, 2, 3]
    assert after["view"]["reason"] == "worker 1 (node 1) exited: killed by SIGKILL"
    assert after["views"][-1]["reason"] == after["view"]["reason"]
    assert ParallelLayout.from_json(after["layout"]).widths == (1, 2)
    assert after["workers"][1]["suspicion"] == "killed by SIGKILL"
    phases = [worker["phase"] for worker in [*before["workers"], *after["workers"]]]
    assert phases.pop(5) == "exited"
    assert set(phases) <= {*STEP_PHASES, "begin", BETWEEN_STEPS}


@proves(Kind.RETURN, Promise.STATUS)
def test_the_status_of_a_worker_that_was_replaced(
    zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    endless = JobSpec(steps=100_000, dump="never", respawn=1, sabotage=BUILDS_UNTIL_SEEN)
    with started(endless, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        before = ask_job(find_job(tmp_path, None), LIMIT_S)
        os.kill(before["workers"][2]["trainer_pid"], signal.SIGKILL)
        building = ask_until(
            tmp_path,
            lambda status: (
                (status["view"]["epoch"], status["workers"][2]["phase"]) == (2, "building")
            ),
        )
        (tmp_path / "seen").touch()
        after = ask_until(tmp_path, lambda status: status["view"]["epoch"] == 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(LIMIT_S) == 143
    assert left_alive(pids_of(tmp_path), limit_s=LIMIT_S) == ()
    assert building["view"]["ranks"] == [0, 1, 3]
    for status, worker in ((building, building["workers"][2]), (after, after["workers"][2])):
        assert (worker["incarnation"], worker["suspicion"]) == (1, None), status
    assert [view["workers"] for view in after["views"]] == [4, 3, 4]
