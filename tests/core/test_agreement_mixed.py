"""Random runs of everything at once: losses, cuts, returns, drains, wishes, ends."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from elaswave_plugin.core.agreement.next_view import LAST_CALL
from elaswave_plugin.core.layout.layout import launch_layout, why_needed
from elaswave_plugin.core.layout.reserve import NOWHERE
from elaswave_plugin.testing import Cluster
from tests.core.test_agreement_cuts import (
    check,
    come_to_rest,
    sealed_job,
    tear,
    working,
)
from tests.core.test_agreement_random import exit_who_is_over, let_somebody_come, works
from tests.sample import sampled

NODES = (
    (0, 0, 0, 0),
    (0, 1, 2, 3),
    (0, 0, 1, 1, 2, 2),
    (0, 1, 1, 2, 2, 3),
    (0, 0, 1, 1, 2, 2, NOWHERE, NOWHERE),
    (2, 1, 0, 0, NOWHERE),
)
GENTLE = ("drain", "replan", "sever", "come", "stop")
ROUGH = ("exit", "respawn", "kill", "doom", "tear", "told", "restart")
KINDS = ("propose", "committed", "quiesced", "prepare", "promise", "admit", "stays", "notice")


@pytest.mark.parametrize("seed", sampled(range(400)))
def test_whatever_happens_at_once_one_job_goes_on(seed: int) -> None:
    check(mixed_run(random.Random(seed), GENTLE + ROUGH))


@pytest.mark.parametrize("seed", sampled(range(150)))
def test_no_wish_ends_a_job(seed: int) -> None:
    """Every stage has somebody in every view."""
    cluster = mixed_run(random.Random(seed), GENTLE)
    check(cluster)
    assert working(cluster)
    layout = cluster.alive[cluster.home[min(working(cluster))]].layout
    for view in cluster.decided.values():
        assert layout is None or why_needed(layout, view.ranks) is None


@pytest.mark.parametrize("seed", sampled(range(150)))
def test_whatever_happens_meanwhile_a_job_that_is_done_ends(seed: int) -> None:
    dice = random.Random(seed)
    cluster = mixed_run(dice, GENTLE)
    finish(cluster, dice)
    assert not cluster.alive


def test_random_runs_are_about_something() -> None:
    runs = [mixed_run(random.Random(seed), GENTLE + ROUGH) for seed in range(80)]
    assert sum(bool(working(run)) for run in runs) >= 25
    assert sum(bool(run.ends and working(run)) for run in runs) >= 10
    gentle = [mixed_run(random.Random(seed), GENTLE) for seed in range(50)]
    said = [line for run in gentle for line in run.lines]
    assert sum("may leave" in line for line in said) >= 25
    assert sum(line.endswith("stays") for line in said) >= 5


def mixed_run(dice: random.Random, kinds: tuple[str, ...]) -> Cluster:
    nodes = dice.choice(NODES)
    cluster = sealed_job(nodes)
    cluster.verbose = True
    width = sum(node != NOWHERE for node in nodes)
    layout = None if width % 2 else launch_layout(tp=1, pp=2, dp=width // 2, num_layers=4)
    stay = dice.choice((None, "tied"))
    described = layout and {**layout.to_json(), "why_workers_stay": stay}
    for turn in range(dice.randrange(2, 12)):
        if not cluster.alive:
            break
        for agreement in cluster.alive.values():
            agreement.layout = described
        ACTIONS[dice.choice(kinds)](cluster, dice, turn)
        for _ in range(dice.randrange(5)):
            go_on(cluster, dice)
    come_to_rest(cluster, dice)
    end_the_last_call(cluster, dice)
    return cluster


def end_the_last_call(cluster: Cluster, dice: random.Random) -> None:
    """End the workers that were all told to leave and have saved; no other comes in any more."""
    last = cluster.decided[max(cluster.decided)]
    members = [slot for slot in last.ranks if slot in working(cluster)]
    if last.reason == LAST_CALL and members:
        for slot in members:
            cluster.act(f"done {slot} 0")
        cluster.run(dice)
        assert cluster.ends.keys() >= cluster.alive.keys()
        exit_who_is_over(cluster)


def go_on(cluster: Cluster, dice: random.Random) -> None:
    cluster.run(dice, most=dice.randrange(15))
    for slot in dice.sample(cluster.seated, len(cluster.seated)):
        if dice.random() < 0.5:
            cluster.act(f"quiesce {slot}")
        if dice.random() < 0.5:
            cluster.act(f"step {slot}")
    for slot in sorted(cluster.new & set(cluster.seated)):
        if dice.random() < 0.5:
            cluster.act(f"ready {slot}")
    if dice.random() < 0.3:
        exit_who_is_over(cluster)
    if dice.random() < 0.3:
        cluster.act(f"tick {dice.choice((0.5, 1.5))}")


def finish(cluster: Cluster, dice: random.Random) -> None:
    """Each worker finishes and exits, while other things happen."""
    at_work = sorted(working(cluster) - cluster.outside)
    finished = []
    for slot in dice.sample(at_work, len(at_work)):
        if slot in working(cluster):
            cluster.act(f"done {slot}")
            finished.append(slot)
        if cluster.alive and dice.random() < 0.3:
            ACTIONS[dice.choice(GENTLE + ROUGH)](cluster, dice, 50)
        cluster.run(dice, most=dice.randrange(20))
        if finished and dice.random() < 0.5:
            exit_finished(cluster, finished.pop(dice.randrange(len(finished))))
    come_to_rest(cluster, dice)
    for slot in [*finished, *at_work]:
        if slot in cluster.seated and works(cluster, slot) and slot not in cluster.left:
            exit_finished(cluster, slot)
            cluster.run(dice)
    come_to_rest(cluster, dice)


def exit_finished(cluster: Cluster, slot: int) -> None:
    if slot in cluster.seated and works(cluster, slot):
        cluster.act(f"done {slot} 0")


def someone(cluster: Cluster, dice: random.Random) -> list[str]:
    """A worker that takes part."""
    slots = sorted(working(cluster) - cluster.outside)
    return [str(dice.choice(slots))] if slots else []


def drain(cluster: Cluster, dice: random.Random, turn: int) -> None:
    for _ in range(dice.randrange(1, 4)):
        if chosen := someone(cluster, dice):
            cluster.act(f"notice {' '.join(chosen)} asked")


def told(cluster: Cluster, dice: random.Random, turn: int) -> None:
    if chosen := someone(cluster, dice):
        cluster.act(f"notice {' '.join(chosen)} {' '.join(['saves'] * dice.randrange(2))}")


def replan(cluster: Cluster, dice: random.Random, turn: int) -> None:
    if chosen := someone(cluster, dice):
        cluster.act(f"replan {' '.join(chosen)}")


def sever(cluster: Cluster, dice: random.Random, turn: int) -> None:
    if chosen := someone(cluster, dice):
        cluster.act(f"sever {' '.join(chosen)}")


def come(cluster: Cluster, dice: random.Random, turn: int) -> None:
    let_somebody_come(cluster, dice, fresh_node=10 + turn)


def stop(cluster: Cluster, dice: random.Random, turn: int) -> None:
    """Those that were dismissed end, and their slots are free."""
    cluster.act("settle all")
    cluster.run(dice)
    exit_who_is_over(cluster)


def exit_one(cluster: Cluster, dice: random.Random, turn: int) -> None:
    if chosen := someone(cluster, dice):
        cluster.act(f"exit {' '.join(chosen)} SIGKILL")


def respawn(cluster: Cluster, dice: random.Random, turn: int) -> None:
    idle = set(cluster.seated) - cluster.trainers - cluster.new - cluster.left
    for slot in sorted(idle):
        if works(cluster, slot) and dice.random() < 0.7:
            cluster.act(f"respawn {slot}")


def kill(cluster: Cluster, dice: random.Random, turn: int) -> None:
    if len(cluster.alive) > 1:
        cluster.act(f"kill {dice.choice(sorted(cluster.alive))}")


def doom(cluster: Cluster, dice: random.Random, turn: int) -> None:
    node, how = dice.choice(sorted(cluster.alive)), dice.choice(("", " restart"))
    cluster.act(f"doom {node} {dice.choice(KINDS)} {dice.randrange(1, 4)}{how}")


def restart(cluster: Cluster, dice: random.Random, turn: int) -> None:
    cluster.act(f"restart {dice.choice(sorted(cluster.alive))}")


def cut(cluster: Cluster, dice: random.Random, turn: int) -> None:
    tear(cluster, dice)


ACTIONS: Mapping[str, Callable[[Cluster, random.Random, int], Any]] = {
    "drain": drain,
    "told": told,
    "replan": replan,
    "sever": sever,
    "come": come,
    "stop": stop,
    "exit": exit_one,
    "respawn": respawn,
    "kill": kill,
    "doom": doom,
    "tear": cut,
    "restart": restart,
}
