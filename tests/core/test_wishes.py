"""A worker that is asked to leave stays where the job would end without it, in any case."""

from collections.abc import Mapping
from typing import Any

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.testing import Cluster

NODES = (0, 1, 2, 3)
# Two stages: slots 0 and 1, slots 2 and 3.
PIPELINES = launch_layout(tp=1, pp=2, dp=2, num_layers=4).to_json()


def job(*, layout: Mapping[str, Any] | None = None) -> Cluster:
    cluster = Cluster(NODES, Timeouts())
    for command in ("start", "quiesce all", "seal all", "step all"):
        cluster.do(command)
    for agreement in cluster.alive.values():
        agreement.layout = layout
    return cluster


def tell(cluster: Cluster, *commands: str) -> list[int]:
    """Return the workers of the last view, once all have done what they were told."""
    for command in (*commands, "tick 2", *["step all", "quiesce all"] * 3):
        cluster.do(command)
    assert not cluster.ends
    return sorted(cluster.decided[max(cluster.decided)].ranks)


@pytest.mark.parametrize(
    ("stay", "commands", "ranks"),
    [
        (None, ["notice 0 asked", "notice 1 asked"], [2, 3]),
        (None, ["notice 0 asked", "notice 2 asked"], [1, 3]),
        (None, ["notice 2 asked", "notice 0 asked", "notice 3 asked"], [1, 3]),
        (None, ["notice 0", "notice 1", "notice 2 asked"], [2, 3]),
        (None, ["notice 2 asked", "notice 0", "notice 1"], [2, 3]),
        ("tied", ["notice 0 asked", "notice 1 asked"], [1, 2, 3]),
        ("tied", ["notice 1 asked", "notice 0 asked"], [0, 2, 3]),
        ("tied", ["notice 0 asked", "notice 1"], [0, 2, 3]),
        ("tied", ["notice 0 asked", "notice 3 asked"], [1, 2]),
        ("tied", ["notice 0 asked", "exit 1 SIGKILL", "quiesce all"], [0, 2, 3]),
        ("tied", ["notice 0 asked", "kill 1", "quiesce all"], [0, 2, 3]),
        ("tied", ["notice 1 asked", "kill 0", "quiesce all"], [1, 2, 3]),
    ],
)
def test_of_a_pipeline_as_many_leave_as_can(
    stay: str | None, commands: list[str], ranks: list[int]
) -> None:
    """All stages find somebody, or workers keep theirs."""
    assert tell(job(layout={**PIPELINES, "why_workers_stay": stay}), *commands) == ranks


@pytest.mark.parametrize(
    ("commands", "ranks"),
    [
        (["notice 0,1,2 asked"], [3]),
        (["notice 3,0,1,2 asked"], [2]),
        (["notice 0 asked", "notice 1", "notice 2", "notice 3"], [0]),
        (["notice 0,1 asked", "kill 2,3"], [1]),
    ],
)
def test_of_replicas_one_stays(commands: list[str], ranks: list[int]) -> None:
    cluster = job()
    assert tell(cluster, *commands) == ranks


def test_where_all_are_told_and_nobody_asked_the_job_ends() -> None:
    cluster = job()
    cluster.do("notice 0,1,2,3")
    assert {end.exit_code for end in cluster.ends.values()} == {143}


def test_who_has_left_is_not_told_to_stay() -> None:
    """The view without it is proposed, and holds unless a failure is due before."""
    cluster = job(layout={**PIPELINES, "why_workers_stay": "tied"})
    for command in ("notice 0 asked", "tick 2"):
        cluster.do(command)
    assert any("propose" in line for line in cluster.lines)
    assert tell(cluster, "notice 1 asked") == [1, 2, 3]
    assert sum("stays" in line for line in cluster.lines) == 1


def test_a_failure_before_it_has_left_keeps_who_was_to_leave() -> None:
    cluster = job(layout={**PIPELINES, "why_workers_stay": "tied"})
    for command in ("notice 0 asked", "tick 2"):
        cluster.do(command)
    assert cluster.boundary  # all are on their way to the step before which it leaves
    assert tell(cluster, "exit 1 SIGKILL", "quiesce all") == [0, 2, 3]


def test_a_stage_that_loses_its_last_worker_goes_on_with_who_waits() -> None:
    """Between two steps it had been let in; without one that waits, the job would end."""
    cluster = job(layout={**PIPELINES, "why_workers_stay": None})
    for command in ("exit 1 SIGKILL", "quiesce all", "exit 3 SIGKILL", "quiesce all", "seal all"):
        cluster.do(command)
    assert tell(cluster, "respawn 3", "exit 2 SIGKILL", "quiesce all") == [0, 3]
