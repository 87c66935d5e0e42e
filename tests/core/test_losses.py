"""Losses of trainers, nodes and leaders, at once and one after the other."""

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.testing import Cluster


def job(*commands: str) -> Cluster:
    """Four nodes of one worker each, all sealed, to whom these things happen."""
    cluster = Cluster((0, 1, 2, 3), Timeouts())
    for command in ("start", "quiesce all", "seal all", *commands):
        cluster.do(command)
    return cluster


def ranks(cluster: Cluster, *slots: int) -> list[int]:
    """The ranks of the last view, which all these trainers were told."""
    told = {cluster.commits[slot][-1] for slot in slots}
    assert len(told) == 1
    return list(told.pop().ranks)


def finish(cluster: Cluster, *slots: int) -> None:
    """The rest of the job is done, and it has ended well."""
    for slot in slots:
        cluster.do(f"done {slot} 0")
    assert {cluster.ends[slot].exit_code for slot in slots} == {0}


def test_losses_one_after_the_other_down_to_one() -> None:
    cluster = job()
    for epoch, victim in ((2, 1), (3, 0), (4, 3)):
        cluster.do(f"exit {victim} SIGKILL")
        cluster.do("quiesce all")
        assert cluster.commits[2][-1].epoch == epoch
    assert ranks(cluster, 2) == [2]
    finish(cluster, 2)


def test_a_second_trainer_killed_during_an_open_proposal() -> None:
    cluster = job("exit 1 SIGKILL", "quiesce 0,1,2")
    assert set(cluster.open) == {3} and len(cluster.decided) == 1
    cluster.do("exit 3 SIGKILL")
    cluster.do("quiesce all")
    assert ranks(cluster, 0, 2) == [0, 2]
    finish(cluster, 0, 2)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_node_killed_during_an_open_proposal(victim: int) -> None:
    cluster = job("exit 1 SIGKILL")
    assert {0, 2, 3} <= set(cluster.open)
    rest = [slot for slot in (0, 2, 3) if slot != victim]
    for slot in rest:
        cluster.do(f"quiesce {slot}")
    assert len(cluster.decided) == 1
    cluster.do(f"kill {victim}")
    cluster.do("quiesce all")
    assert sorted(ranks(cluster, *rest)) == rest
    finish(cluster, *rest)


def test_leader_and_a_trainer_killed_at_once() -> None:
    cluster = job()
    cluster.act("kill 0")
    cluster.act("exit 2 SIGKILL")
    cluster.run()
    for _ in range(2):
        cluster.do("quiesce all")
    assert ranks(cluster, 1, 3) == [1, 3]
    finish(cluster, 1, 3)


def test_a_job_is_surely_over_only_once_each_of_its_workers_has_told_its_end() -> None:
    """A node that is cut off takes the others, who may go on, for lost."""
    told, cut_off = job("done 3 0", "done 2 0"), job("done 3 0", "done 2 0", "kill 1")
    for cluster in (told, cut_off):
        assert not cluster.ends and not cluster.alive[0].all_ended
    finish(told, 1, 0)
    finish(cut_off, 0)
    assert told.alive[0].all_ended and not cut_off.alive[0].all_ended


@pytest.mark.parametrize(("finished", "code"), [(5, 1), (9, 0)])
def test_a_script_that_fails_where_the_others_finish_fails_the_job(
    finished: int, code: int
) -> None:
    cluster = job("exit 0 1 5", "quiesce all", f"done 1,2,3 0 {finished}")
    end = cluster.ends[1]
    assert end.exit_code == code
    assert ("worker 0 failed in step 5: ValueError" in str(end.reason)) == bool(code)


def test_a_script_that_failed_and_was_started_again_does_not() -> None:
    cluster = job("exit 0 1 5", "quiesce all", "ready 0", "quiesce all")
    cluster.do("done 0,1,2,3 0 5")
    assert cluster.ends[1].exit_code == 0
