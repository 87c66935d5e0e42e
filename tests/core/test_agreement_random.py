"""Random losses, returns and deliveries: agents never disagree on a view, and waits end."""

import random
from collections.abc import Sequence

import pytest

from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.reserve import NOWHERE
from elaswave_plugin.testing import Cluster
from tests.sample import sampled

LAUNCHED = ((0, 0, 0, 0), (0, 0, 1, 1, 2, 2), (0, 1, 2), (0, 1, 2, 3, 4))
GROWING = ((0, 1, 2, NOWHERE), (0, 0, 1, 1, NOWHERE, NOWHERE), (0, 0, 1, 2, NOWHERE))


@pytest.mark.parametrize("seed", [*sampled(range(600)), 3768])
def test_no_order_of_events_makes_members_disagree(seed: int) -> None:
    """Random losses, returns, answers and delivery: one view an epoch, one path, waits end.

    A newcomer meets its job between two steps, whatever else happens. (The last seed fails
    where a leader that adopts a view keeps a newcomer in it that was never told.)
    """
    check_paths(random_run(random.Random(seed)))


@pytest.mark.parametrize("seed", sampled(range(300)))
def test_no_order_of_events_makes_newcomers_disagree(seed: int) -> None:
    """The same, while other nodes take the places of lost ones."""
    check_paths(random_run(random.Random(seed), newcomers=True))


@pytest.mark.parametrize("seed", sampled(range(600)))
def test_no_death_of_an_agent_makes_members_disagree(seed: int) -> None:
    """The same, while agents die and their next lives begin, in the midst of what they send."""
    check_paths(random_run(random.Random(seed), newcomers=seed % 2 == 0, restarts=True))


def test_newcomers_enter_in_random_runs() -> None:
    """The runs above are about something: in many of them a newcomer is in the last view."""
    entered = [random_run(random.Random(seed), newcomers=True).entered for seed in range(100)]
    assert sum(map(bool, entered)) >= 10


@pytest.mark.parametrize("seed", range(100))
def test_no_order_of_events_makes_a_growing_job_disagree(seed: int) -> None:
    """The same, where the last slots have nobody at the launch."""
    check_paths(random_run(random.Random(seed), newcomers=True, choices=GROWING))


def test_random_runs_grow() -> None:
    """In many of the runs above somebody beyond the launch is let in."""
    seeds = map(random.Random, range(100))
    runs = [random_run(seed, newcomers=True, choices=GROWING) for seed in seeds]
    assert sum(bool(run.entered - run.launched) for run in runs) >= 15


def random_run(
    dice: random.Random,
    *,
    newcomers: bool = False,
    restarts: bool = False,
    choices: Sequence[tuple[int, ...]] = LAUNCHED,
) -> Cluster:
    """``choices``: the nodes of the slots, of which one is taken."""
    nodes = dice.choice(choices)
    cluster = Cluster(nodes, Timeouts(quiesce_timeout_s=1e9, join_timeout_s=1e9))
    cluster.verbose = False
    cluster.do("start")
    cluster.do("quiesce all")
    cluster.do("seal all")
    exits, kills = (0.2, 0.6) if newcomers else (0.4, 0.6)
    for turn in range(dice.randrange(1, 9)):
        for one in dice.sample(cluster.seated, len(cluster.seated)):
            for _ in range(dice.randrange(3)):
                cluster.act(f"step {one}")
        if newcomers:
            let_somebody_come(cluster, dice, fresh_node=10 + turn)
        idle = set(cluster.seated) - cluster.trainers
        for slot in sorted(idle) if dice.random() < 0.7 else ():
            if not works(cluster, slot):
                continue
            cluster.act(f"{'ready' if slot in cluster.new else 'respawn'} {slot}")
        if not cluster.alive:
            break
        slot, node = dice.choice(cluster.seated or [0]), dice.choice(sorted(cluster.alive))
        what = dice.random()
        if what < exits and slot in cluster.trainers:
            cluster.act(f"exit {slot} SIGKILL")
        elif restarts and dice.random() < 0.4:
            others = sorted({*cluster.alive} - {node})
            link = f"relink {node} {dice.choice(others)}" if others else ""
            cluster.act(link if link and dice.random() < 0.4 else f"restart {node}")
        elif what < kills and len(cluster.alive) > 1:
            cluster.act(f"kill {node}")
        elif what < 0.8:
            kinds = ["propose", "committed", "quiesced", "prepare", "promise"]
            kind = dice.choice(kinds + ["admit"] * newcomers)
            how = " restart" if restarts and dice.random() < 0.6 else ""
            cluster.act(f"doom {node} {kind} {dice.randrange(1, 4)}{how}")
        cluster.run(dice)
        if dice.random() < 0.7 and cluster.alive:
            for quiet in dice.sample(cluster.seated, len(cluster.seated)):
                cluster.act(f"quiesce {quiet}")
                cluster.run(dice)
    for _ in range(20):
        if not cluster.alive or len(cluster.ends) == len(cluster.alive):
            break
        for slot in [s for s in sorted(cluster.new) if works(cluster, s)]:
            cluster.act(f"ready {slot}")
        cluster.act("quiesce all")
        cluster.run(dice)
        for one in dice.sample(cluster.seated, len(cluster.seated)):
            cluster.act(f"step {one}")
        cluster.run(dice)
        exit_who_is_over(cluster)
        lose_who_is_silent(cluster)
        cluster.act("tick 6")
        cluster.run(dice)
    return cluster


def exit_who_is_over(cluster: Cluster) -> None:
    """The process of an agent that has ended does so too, and all links of it close."""
    over = sorted(set(cluster.ends) & set(cluster.alive))
    if over:
        cluster.act(f"kill {' '.join(map(str, over))}")


def lose_who_is_silent(cluster: Cluster) -> None:
    """A leader sends beats, and hears those that follow it and no others (`Coordinator._beat`)."""
    for node in list(cluster.alive):
        for other in list(cluster.alive):
            if node in cluster.alive and other in cluster.alive and node != other:
                leader, theirs = cluster.alive[node].leader, cluster.alive[other].leader
                knows = cluster.alive[other].nodes.lives(node)
                if leader in (node, other) and not (knows and theirs in (node, other)):
                    cluster.alive[node].lost(other, "was silent")
                    cluster.settle(node)


def let_somebody_come(cluster: Cluster, dice: random.Random, *, fresh_node: int) -> None:
    """For slots without an agent, on a node that lives, that was lost, or that is new."""
    empty = sorted(set(range(cluster.width)) - set(cluster.seated))
    if empty and dice.random() < 0.7:
        slots = dice.sample(empty, dice.randrange(1, len(empty) + 1))
        node = dice.choice([*{*cluster.home.values()}, *3 * [fresh_node]])
        if node not in cluster.asking:
            cluster.act(f"join {node} {','.join(map(str, slots))}")
        if dice.random() < 0.5:
            cluster.run(dice)


def works(cluster: Cluster, slot: int) -> bool:
    """Return whether the agent of a slot lives, and the job goes on there."""
    return cluster.agent_of(slot) is not None and cluster.home[slot] not in cluster.ends


def check_paths(cluster: Cluster) -> None:
    by_epoch: dict[int, MembershipView] = {}
    for views in cluster.commits.values():
        epochs = [view.epoch for view in views]
        assert epochs == sorted(set(epochs))
        for view in views:
            assert by_epoch.setdefault(view.epoch, view) == view
    live = [s for s in cluster.seated if s in cluster.trainers and works(cluster, s)]
    assert not (set(cluster.open) & set(live))
    finals = {cluster.commits[slot][-1] for slot in live}
    assert len(finals) <= 1
    if finals:
        assert sorted(finals.pop().ranks) == sorted(live)
    # Whoever is in the last view has applied every view that any other member of it has applied.
    paths = {tuple(view.epoch for view in cluster.commits[slot]) for slot in live}
    assert len(paths) <= 1
