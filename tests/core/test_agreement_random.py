"""Random losses, returns and deliveries: supervisors never disagree on a view, and waits end."""

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


@pytest.mark.parametrize("seed", [*sampled(range(600), share=80), 3768])
def test_no_order_of_events_makes_members_disagree(seed: int) -> None:
    """Random losses, returns, answers and delivery: one view an epoch, one path, waits end.

    A newcomer meets its job between two steps, whatever else happens. (The last seed fails
    where a leader that adopts a view keeps a newcomer in it that was never told.)
    """
    check_paths(random_run(random.Random(seed)))


@pytest.mark.parametrize("seed", sampled(range(300), share=40))
def test_no_order_of_events_makes_newcomers_disagree(seed: int) -> None:
    """The same, while other supervisors take the places of lost ones."""
    check_paths(random_run(random.Random(seed), newcomers=True))


def test_newcomers_enter_in_random_runs() -> None:
    """The runs above are about something: in many of them a newcomer is in the last view."""
    entered = [random_run(random.Random(seed), newcomers=True).entered for seed in range(50)]
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
        for one in dice.sample(sorted(cluster.alive), len(cluster.alive)):
            for _ in range(dice.randrange(3)):
                cluster.act(f"step {one}")
        if newcomers:
            let_somebody_come(cluster, dice, fresh_node=10 + turn)
        idle = [one for one in cluster.alive if one not in cluster.trainers | set(cluster.ends)]
        if idle and dice.random() < 0.7:
            slot = dice.choice(idle)
            cluster.act(f"{'ready' if slot in cluster.new else 'respawn'} {slot}")
        if not cluster.alive:
            break
        slot = dice.choice(sorted(cluster.alive))
        what = dice.random()
        if what < exits and slot in cluster.trainers:
            cluster.act(f"exit {slot} SIGKILL")
        elif what < kills and len(cluster.alive) > 1:
            cluster.act(f"kill {slot}")
        elif what < 0.8:
            kinds = ["propose", "committed", "quiesced", "prepare", "promise"]
            kind = dice.choice(kinds + ["admit"] * newcomers)
            cluster.act(f"doom {slot} {kind} {dice.randrange(1, 4)}")
        cluster.run(dice)
        if dice.random() < 0.7 and cluster.alive:
            for quiet in dice.sample(sorted(cluster.alive), len(cluster.alive)):
                cluster.act(f"quiesce {quiet}")
                cluster.run(dice)
    for _ in range(20):
        if not cluster.alive or len(cluster.ends) == len(cluster.alive):
            break
        cluster.act("quiesce all")
        cluster.run(dice)
        for one in dice.sample(sorted(cluster.alive), len(cluster.alive)):
            cluster.act(f"step {one}")
        cluster.run(dice)
        cluster.act("tick 6")
        cluster.run(dice)
    return cluster


def let_somebody_come(cluster: Cluster, dice: random.Random, *, fresh_node: int) -> None:
    """For a slot without supervisor, on a node that lives, that was lost, or that is new."""
    empty = sorted(set(range(len(cluster.nodes))) - set(cluster.alive) - set(cluster.asking))
    if empty and dice.random() < 0.7:
        slot, node = dice.choice(empty), dice.choice([*cluster.nodes, fresh_node])
        cluster.act(f"join {slot} {node}")
        if dice.random() < 0.5:
            cluster.run(dice)


def check_paths(cluster: Cluster) -> None:
    by_epoch: dict[int, MembershipView] = {}
    for views in cluster.commits.values():
        epochs = [view.epoch for view in views]
        assert epochs == sorted(set(epochs))
        for view in views:
            assert by_epoch.setdefault(view.epoch, view) == view
    assert not (set(cluster.open) & set(cluster.alive) - set(cluster.ends))
    live = [slot for slot in cluster.alive if slot in cluster.trainers and slot not in cluster.ends]
    finals = {cluster.commits[slot][-1] for slot in live}
    assert len(finals) <= 1
    if finals:
        assert sorted(finals.pop().ranks) == sorted(live)
    # Whoever is in the last view has applied every view that any other member of it has applied.
    paths = {tuple(view.epoch for view in cluster.commits[slot]) for slot in live}
    assert len(paths) <= 1
